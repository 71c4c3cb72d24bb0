#!/usr/bin/env bash
# Runs the tests, on a fresh machine too: `bash tests/run.sh [pytest arguments]`.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../examples/common/environment.sh"
lengen_setup test
cd "$LENGEN_ROOT"
# One thread for each process: many tests start several.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest "${@:-tests}"
