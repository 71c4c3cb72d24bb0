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
source "$HERE/common/recipe.sh"

PRESET="${PRESET:-tiny}"
OUT="${OUT:-runs/smollm3_cpt_vpad}"
if [ ! -f "$HERE/presets/smollm3_$PRESET.sh" ]; then
    echo "error: PRESET: found $PRESET; allowed: tiny, 3b" >&2
    exit 2
fi
source "$HERE/presets/smollm3_$PRESET.sh"

# The three settings of the comparison: weight decay, none, and none with VPAD.
declare -A VARIANT_ARGS=(
    [wd]="--weight-decay 0.1"
    [no_wd]="--weight-decay 0.0"
    [vpad]="--weight-decay 0.0 --dropout-variant vpad --dropout-rate $DROPOUT_RATE"
)

# A corpus with no download, a tokenizer and a base model, all of this run's size.
prepare_tiny() {
    RUNS="${RUNS:-wd no_wd vpad}"
    HELDOUT="$OUT/corpus/heldout.jsonl"
    TOKENIZER="$OUT/tokenizer/tokenizer.model"
    BASE_CHECKPOINT="$OUT/base"
    NEEDLE_ARGS+=(--lengths "$LENGTH,$((2 * LENGTH)),$((4 * LENGTH)),$((8 * LENGTH)),$((16 * LENGTH))")
    POSITION_ARGS+=(--max-length "$((16 * LENGTH))")

    headline "corpus and tokenizer"
    if [ ! -f "$OUT/corpus/heldout.jsonl" ]; then
        python_tool tools/data/tiny_corpus.py --output "$OUT/corpus" --force "${CORPUS_ARGS[@]}"
    fi
    if [ ! -f "$TOKENIZER" ]; then
        python_tool tools/data/train_tokenizer.py --input "$OUT/corpus/train.jsonl" \
            --vocab-size "$VOCABULARY" --output "$TOKENIZER"
    fi
    local part
    for part in train needles valid; do
        if [ ! -f "$OUT/data/$part.idx" ]; then
            python_tool tools/data/preprocess.py --input "$OUT/corpus/$part.jsonl" \
                --tokenizer "$TOKENIZER" --output-prefix "$OUT/data/$part" --force
        fi
    done
    MODEL_ARGS+=(--tokenizer-model "$TOKENIZER")
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

# stage FOLDER ITERATIONS FROM ARGS...: train in FOLDER, from FROM's weights, or where it was.
stage() {
    local folder="$1" iterations="$2" start=()
    [ -z "$3" ] || start=(--pretrained-checkpoint "$3")
    shift 3
    is_finished "$folder" "$iterations" && return
    train "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "$@" "${start[@]}" --load "$folder" \
        --save "$folder" --metrics-jsonl "$folder/metrics.jsonl"
}

# The released stage-3 checkpoint as a Megatron one.
prepare_3b() {
    RUNS="${RUNS:-vpad}"
    if [ -z "${BASE:-}" ] || [ -z "${DATA:-}" ]; then
        echo "error: PRESET=3b needs BASE (a SmolLM3 folder or hub id) and DATA (the prefix of an" \
            "indexed dataset)" >&2
        exit 2
    fi
    BASE_CHECKPOINT="$OUT/base"
    NEEDLE_ARGS+=(--lengths "4096,8192,16384,32768,65536")
    POSITION_ARGS+=(--max-length 65536)
    headline "base model: $BASE"
    local revision=()
    [ -d "$BASE" ] || revision=(--revision "$REVISION")
    if main_node && ! has_checkpoint "$BASE_CHECKPOINT"; then
        python_tool tools/checkpoint/convert.py to-megatron --load "$BASE" "${revision[@]}" \
            --save "$BASE_CHECKPOINT"
    fi
    until has_checkpoint "$BASE_CHECKPOINT" || [ "${DRY_RUN:-0}" = 1 ]; do sleep 10; done
    MODEL_ARGS+=(--tokenizer-model "$BASE_CHECKPOINT/release/tokenizer")
    DATA_ARGS=(--data-path "$DATA" --split 999,1,0)
}

# continue_with NAME: continual pre-training of one model from the base.
continue_with() {
    local settings
    read -ra settings <<<"${VARIANT_ARGS[$1]}"
    headline "$1: $CPT_ITERS iterations with windows of $WINDOW (${VARIANT_ARGS[$1]})"
    stage "$OUT/$1" "$CPT_ITERS" "$BASE_CHECKPOINT" "${DATA_ARGS[@]}" "${CPT_ARGS[@]}" \
        --sliding-window "$WINDOW" --window-attn-skip-freq 4 "${settings[@]}"
}

# measure NAME: the model as a Hugging Face folder, verified, and its evaluation.
measure() {
    local folder="$OUT/$1"
    headline "$1: Hugging Face folder and evaluation"
    if [ ! -f "$folder/huggingface/config.json" ]; then
        python_tool tools/checkpoint/convert.py to-hf --load "$folder" \
            --save "$folder/huggingface"
    fi
    if [ -n "${HELDOUT:-}" ]; then
        python_tool tools/evaluate/position_loss.py --model "$folder/huggingface" \
            --data "$HELDOUT" --train-length "$LENGTH" --output "$folder/position_loss" \
            "${POSITION_ARGS[@]}"
    fi
    python_tool tools/evaluate/needle.py --model "$folder/huggingface" \
        --train-length "$LENGTH" --output "$folder/needle" "${NEEDLE_ARGS[@]}"
}

if [ "${DRY_RUN:-0}" = 1 ]; then
    PYTHON="${PYTHON:-python3}"
else
    lengen_setup base
    mkdir -p "$OUT"
fi
"prepare_$PRESET"
for name in $RUNS; do
    continue_with "$name"
done
main_node || exit 0
reports=()
for name in $RUNS; do
    measure "$name"
    reports+=("$name=$OUT/$name")
done
headline "report"
python_tool tools/evaluate/report.py --runs "${reports[@]}" --output "$OUT" \
    --train-length "$LENGTH" --title "SmolLM3 ($PRESET), continual pre-training with windows"
headline "done: $OUT/report.md, report.json, report.png"
