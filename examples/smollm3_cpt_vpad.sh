#!/usr/bin/env bash
# Continual pre-training of a SmolLM3 with sliding windows and VPAD (Tables 1 and 6 of the paper),
# beside weight decay and no weight decay; then Hugging Face folders, evaluation beyond the
# training length, and a report with a picture.
#
#   bash examples/smollm3_cpt_vpad.sh                        a tiny model, on any machine
#   PRESET=3b BASE=HuggingFaceTB/SmolLM3-3B-checkpoints DATA=PREFIX HELDOUT=FILE \
#       bash examples/smollm3_cpt_vpad.sh                    the paper's run, on GPUs
#
# Interrupted and started again, it goes on where it was.
#   PRESET   tiny (default without a GPU) or 3b
#   OUT      output folder (default runs/smollm3_cpt_vpad)
#   RUNS     which models: wd no_wd vpad (default: all for tiny, vpad for 3b)
#   DRY_RUN  1 prints the commands and runs nothing
# Nodes and processes come from torchrun's, Slurm's or Kubernetes' variables (common/launch.sh).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/common/comparison.sh"

PRESET="${PRESET:-tiny}"
OUT="${OUT:-runs/smollm3_cpt_vpad}"
source_preset smollm3 tiny 3b

# A corpus, a tokenizer and a base model, all of this run's size.
prepare_tiny() {
    RUNS="${RUNS:-wd no_wd vpad}"
    BASE_CHECKPOINT="$OUT/base"
    NEEDLE_ARGS+=(--lengths "$LENGTH,$((2 * LENGTH)),$((4 * LENGTH)),$((8 * LENGTH)),$((16 * LENGTH))")
    POSITION_ARGS+=(--max-length "$((16 * LENGTH))")
    tiny_corpus train needles valid
    DATA_ARGS=(
        --train-data-path "$TEXT_SHARE" "$OUT/data/train" "$NEEDLE_SHARE" "$OUT/data/needles"
        --valid-data-path "$OUT/data/valid"
    )

    headline "base model, recall: $RECALL_ITERS iterations on needle documents"
    stage "$OUT/base_recall" "$RECALL_ITERS" "" --train-data-path "$OUT/data/needles" \
        "${RECALL_ARGS[@]}" --eval-iters 0
    headline "base model, text and needles: $BASE_ITERS iterations"
    stage "$OUT/base" "$BASE_ITERS" "$OUT/base_recall" "${DATA_ARGS[@]}" "${BASE_ARGS[@]}"
}

# The released stage-3 checkpoint as a Megatron one.
prepare_3b() {
    RUNS="${RUNS:-vpad}"
    BASE_CHECKPOINT="$OUT/base"
    NEEDLE_ARGS+=(--lengths "4096,8192,16384,32768,65536")
    POSITION_ARGS+=(--max-length 65536)
    import_model "$BASE" "$REVISION" "$BASE_CHECKPOINT"
    DATA_ARGS=(--data-path "$DATA" --split 999,1,0)
}

# continue_with NAME: continual pre-training of one model from the base.
continue_with() {
    local settings
    read -ra settings <<<"$(settings_of "$1")"
    headline "$1: $CPT_ITERS iterations with windows of $WINDOW (${settings[*]})"
    stage "$OUT/$1" "$CPT_ITERS" "$BASE_CHECKPOINT" "${DATA_ARGS[@]}" "${CPT_ARGS[@]}" \
        --sliding-window "$WINDOW" --window-attn-skip-freq 4 "${settings[@]}"
}

prepared
"prepare_$PRESET"
check_runs
for name in $RUNS; do
    continue_with "$name"
done
report "SmolLM3 ($PRESET), continual pre-training with windows"
