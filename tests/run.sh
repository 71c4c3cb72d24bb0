#!/usr/bin/env bash
# Runs the tests, on a fresh machine too: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../examples/common/environment.sh"
lengen_setup test
cd "$LENGEN_ROOT"
# One thread for each process: many tests start several.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
(($# == 0)) || exec "$PYTHON" -m pytest "$@"
failed=0
for part in tests/unit "tests/parallel tests/parity" tests/gpu; do # conftest.py shares out the cores
    # shellcheck disable=SC2086
    "$PYTHON" -m pytest $part || failed=$?
    ((failed < 2)) || exit "$failed" # interrupted, or not even started
done
exit "$failed"
