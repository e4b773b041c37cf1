#!/usr/bin/env bash
# Run the tests; arguments go to pytest. On two cores the whole suite takes an hour and more.
#
#   ./run_tests.sh              the tests
#   ./run_tests.sh --all        the tests with all foreign bugs, every planted fault in fp32 and autocast, and the sweep of correct runs
set -euo pipefail
source "$(dirname "$0")/environment.sh" requirements.txt requirements-transformers-tp.txt requirements-studies.txt requirements-record.txt requirements-test.txt
cd "$ROOT"
export OMP_NUM_THREADS=1 # the two processes share two cores
TESTS=("$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder)
if [ "${1:-}" = --all ]; then
  "${TESTS[@]}" --all "${@:2}"
  for precision in fp32 autocast; do
    "$PYTHON" run_faults.py --precision $precision --output runs/faults-$precision.json
  done
  exec "$PYTHON" benchmarks/clean_sweep.py --output runs/clean_sweep.json
fi
exec "${TESTS[@]}" "$@"
