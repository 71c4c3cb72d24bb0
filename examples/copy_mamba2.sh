#!/usr/bin/env bash
# Mamba2 on the synthetic copy task (Tables 4, 6 and 13 of the paper): weight decay, none, and none
# with dropout in front of the input projections as PL-D and as VPAD, each over several seeds; then
# sources longer than those of training, and a report with a picture.
#
#   bash examples/copy_mamba2.sh                a tiny model, on any machine
#   PRESET=45m bash examples/copy_mamba2.sh     the paper's size, on a GPU
#
# Interrupted and started again, it goes on where it was.
#   PRESET   tiny (default) or 45m
#   OUT      output folder (default runs/copy_mamba2_PRESET)
#   RUNS     which settings (default: wd no_wd pl_d vpad)
#   SEEDS    a model of each setting for each seed (default: 1 2 for tiny, 1 2 3 4 5 for 45m)
#   STEPS    iterations of each model
#   JOBS     models trained at once on one machine (default: 2 for tiny, 1 for 45m)
#   DRY_RUN  1 prints the commands and runs nothing
# Nodes and processes come from torchrun's, Slurm's or Kubernetes' variables (common/launch.sh).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/common/recipe.sh"

PRESET="${PRESET:-tiny}"
OUT="${OUT:-runs/copy_mamba2_$PRESET}"
RUNS="${RUNS:-wd no_wd pl_d vpad}"
if [ ! -f "$HERE/presets/copy_mamba2_$PRESET.sh" ]; then
    echo "error: PRESET: found $PRESET; allowed: tiny, 45m" >&2
    exit 2
fi
find_layout
source "$HERE/presets/copy_mamba2_$PRESET.sh"
check_number JOBS "$JOBS" 1 64
((nodes == 1)) || JOBS=1
TRAIN_SCRIPT=pretrain_mamba.py

# The four settings of the comparison; p = 0.1 as in the paper.
declare -A VARIANT_ARGS=(
    [wd]="--weight-decay 0.1"
    [no_wd]="--weight-decay 0.0"
    [pl_d]="--weight-decay 0.0 --dropout-variant pre_linear --dropout-rate 0.1"
    [vpad]="--weight-decay 0.0 --dropout-variant vpad --dropout-rate 0.1"
)
for name in $RUNS; do
    [ -n "${VARIANT_ARGS[$name]:-}" ] || fail "RUNS: found $name; allowed: wd, no_wd, pl_d, vpad"
done
for seed in $SEEDS; do
    check_number SEEDS "$seed" 0 999999999
done

# model NAME SEED: one model, trained and measured, in OUT/NAME-SEED.
model() {
    local folder="$OUT/$1-$2" settings
    read -ra settings <<<"${VARIANT_ARGS[$1]}"
    if ! is_finished "$folder" "$STEPS"; then
        headline "$1, seed $2: $STEPS iterations (${VARIANT_ARGS[$1]})"
        train "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${settings[@]}" \
            --seed "$2" --load "$folder" --save "$folder" --metrics-jsonl "$folder/metrics.jsonl"
    fi
    main_node || return 0
    python_tool tools/evaluate/copy_task.py --model "$folder" --output "$folder/copy_task" \
        "${EVALUATION_ARGS[@]}"
}

# labelled NAME COMMAND...: what it says, each line with a name before it. A signal to the whole
# group does not end what passes the lines on, so that training can still speak while it saves.
labelled() {
    local label="$1"
    shift
    "$@" > >(trap '' TERM INT USR1; exec sed -u "s/^/[$label] /")
}

if [ "${DRY_RUN:-0}" = 1 ]; then
    PYTHON="${PYTHON:-python3}" JOBS=1
else
    lengen_setup base
    mkdir -p "$OUT"
    if ((JOBS > 1)); then
        cores="$(nproc)"
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > JOBS ? cores / JOBS : 1))}"
    fi
fi
started=() reports=()
# Seed after seed, so that a first comparison is there early.
for seed in $SEEDS; do
    for name in $RUNS; do
        reports+=("$name=$OUT/$name-$seed")
        if ((JOBS == 1)); then
            model "$name" "$seed"
            continue
        fi
        labelled "$name-$seed" model "$name" "$seed" &
        started+=($!)
        if ((${#started[@]} == JOBS)); then
            finish "${started[@]}"
            started=()
        fi
    done
done
finish "${started[@]}"
main_node || exit 0
headline "report"
python_tool tools/evaluate/copy_report.py --runs "${reports[@]}" --output "$OUT" \
    --title "Mamba2 ($PRESET) on the copy task"
headline "done: $OUT/report.md, report.json, report.png"
