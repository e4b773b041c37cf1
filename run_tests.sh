#!/usr/bin/env bash
# Run the tests; arguments go to pytest. On two cores the whole suite takes less than ten minutes.
set -euo pipefail
source "$(dirname "$0")/environment.sh" requirements.txt requirements-transformers-tp.txt requirements-test.txt
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
