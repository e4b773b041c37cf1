#!/usr/bin/env bash
# Run the tests; arguments go to pytest. On two cores the whole suite takes less than ten minutes.
set -euo pipefail
cd "$(dirname "$0")"
source environment.sh requirements-test.txt
exec "$PYTHON" -m pytest tests "$@"
