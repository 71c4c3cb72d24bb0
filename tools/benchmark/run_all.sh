#!/usr/bin/env bash
# Every benchmark on this machine, and the page of what they found: docs/performance/*.json and
# docs/performance.md. A few minutes each on a CPU; where there is a CUDA device, the GPU's sizes, too.
#
#   bash tools/benchmark/run_all.sh              all of them
#   bash tools/benchmark/run_all.sh norm step    only these
#   QUICK=1 RESULTS=/tmp/results bash tools/benchmark/run_all.sh   tiny sizes, to try it
#
# One that fails is named at the end and stops no other; its older report stays.
#   RESULTS  folder of the reports (default: docs/performance)
#   PAGE     the page (default: docs/performance.md; next to RESULTS where that is another)
#   PYTHON   interpreter (default: python3)
#   THREADS  of the CPU (default: 1)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}"
results="${RESULTS:-$root/docs/performance}"
page="${PAGE:-${results%/}.md}"
if [ -n "${QUICK:-}" ] && [ -z "${RESULTS:-}" ]; then
    echo "error: QUICK: needs RESULTS: tiny sizes are not what docs/performance shows" >&2
    exit 2
fi
threads="${THREADS:-1}"
export OMP_NUM_THREADS="$threads"

names=(norm cross_entropy attention ssd mamba step preprocess convert)
wanted=("${@:-${names[@]}}")
for name in "${wanted[@]}"; do
    case " ${names[*]} " in
    *" $name "*) ;;
    *)
        echo "error: $name: no such benchmark; allowed: ${names[*]}" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$results"
results="$(cd "$results" && pwd)" page="$(cd "$(dirname "$page")" && pwd)/$(basename "$page")"
cd "$root"
failed=()
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# measure REPORT SCRIPT FLAGS...: one benchmark into REPORT.json, if its SCRIPT is wanted.
measure() {
    local report="$1" script="$2"
    shift 2
    case " ${wanted[*]} " in
    *" $script "*) ;;
    *) return 0 ;;
    esac
    echo "== $report: $script.py $*"
    if "$python" -W ignore "$here/$script.py" "$@" --json "$scratch/$report.json"; then
        mv "$scratch/$report.json" "$results/"
    else
        failed+=("$report")
    fi
}

on_cpu() {
    measure norm_cpu norm --device cpu --threads "$threads"
    measure cross_entropy_cpu cross_entropy --threads "$threads"
    measure attention_cpu attention --threads "$threads"
    measure ssd_cpu ssd --threads "$threads"
    measure ssd_bf16_cpu ssd --threads "$threads" --dtype bf16
    measure mamba_tiny_cpu mamba --threads "$threads" --preset tiny --vpad 0.1
    measure mamba_text_cpu mamba --threads "$threads" --preset text --vpad 0.1
    measure step_tiny_cpu step --device cpu --threads "$threads" --preset tiny
    measure step_tiny_bf16_cpu step --device cpu --threads "$threads" --preset tiny --dtype bf16
    measure step_135m_cpu step --device cpu --threads "$threads" --preset 135m --repeat 2
    measure preprocess_cpu preprocess --workers 1 2
    measure convert_cpu convert --size 3
}

on_cuda() {
    measure norm_cuda norm --device cuda --rows 65536 --hidden 2048 --dtype bf16 --repeat 50
    measure cross_entropy_cuda cross_entropy --device cuda --dtype bf16 --tokens 8192 \
        --hidden 2048 --vocabulary 128256 --repeat 10
    measure attention_cuda attention --device cuda --parts kinds --heads 16 --groups 4 \
        --channels 128 --repeat 10
    measure ssd_cuda ssd --device cuda --dtype bf16 --batch 4 --length 2048
    measure mamba_85m_cuda mamba --device cuda --preset 85m --vpad 0.1
    measure step_135m_cuda step --device cuda --preset 135m --dtype bf16
    measure step_3b_cuda step --device cuda --preset 3b --dtype bf16 --batch 2 --no-peer --apart
}

tiny() {
    measure norm_cpu norm --device cpu --rows 64 --hidden 64 --repeat 1 --threads "$threads" --no-compile
    measure cross_entropy_cpu cross_entropy --tokens 64 --hidden 64 --vocabulary 512 --repeat 1
    measure attention_cpu attention --lengths 64 128 --kind-lengths 64 --dense-length 64 \
        --entmax-length 64 --window 16 --repeat 1 --no-compile
    measure ssd_cpu ssd --length 64 --hidden 32 --heads 4 --head-dim 16 --state 8 --repeat 1 \
        --no-compile
    measure mamba_cpu mamba --layers 1 --batch 1 --length 16 --repeat 1
    measure step_cpu step --device cpu --threads "$threads" --layers 1 --batch 1 --length 32 \
        --repeat 1
    measure preprocess_cpu preprocess --size 0.5 --repeat 1
    measure convert_cpu convert --size 0.1 --repeat 1
}

if [ -n "${QUICK:-}" ]; then
    tiny
else
    on_cpu
    if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        on_cuda
    fi
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
fi
"$python" "$here/report.py" --results "$results" --output "$page"
[ ${#failed[@]} -eq 0 ]
