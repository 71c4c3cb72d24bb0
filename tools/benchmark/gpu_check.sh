#!/usr/bin/env bash
# Everything that only a GPU can say, in one run of at most 8 minutes: kernels against their
# definitions, norm, cross-entropy, attention, a training step of SmolLM3-3B, and a short training
# run of every variant; a table, targets met or missed, and JSON.
#
#   bash tools/benchmark/gpu_check.sh                          results in $OUT or runs/gpu_check
#   bash tools/benchmark/gpu_check.sh --output DIR --stages norm step
#   bash tools/benchmark/gpu_check.sh --device cpu --quick     the same steps, tiny, on any machine
#
# A machine without a network brings what its Python lacks as wheels in CARRY (default: carry/ beside
# this file): they are unpacked into a temporary folder and nothing is installed. With Python 3.12,
# PyTorch, transformers and pytest there, megatron-core is all that is needed:
#   pip download megatron-core==0.16.1 entmax --no-deps --python-version 3.12 \
#       --only-binary=:all: --dest tools/benchmark/carry
# Caches and logs go to a temporary folder; the repository stays as it is.
#   CARRY    folder of wheels
#   PYTHON   interpreter (default: python3)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

site="$scratch/site"
mkdir "$site"
for wheel in "${CARRY:-$here/carry}"/*.whl; do
    [ -e "$wheel" ] || continue
    if ! "$python" -m zipfile -e "$wheel" "$site" 2>/dev/null; then
        echo "error: CARRY: found $wheel, which is no whole wheel; download it again" >&2
        exit 2
    fi
done
export PYTHONPATH="$root:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TMPDIR="$scratch" LENGEN_CACHE="$scratch/lengen" XDG_CACHE_HOME="$scratch/cache"
export TRITON_CACHE_DIR="$scratch/triton" TORCHINDUCTOR_CACHE_DIR="$scratch/inductor"
"$python" "$here/gpu_check.py" "$@"
