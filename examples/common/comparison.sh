# shellcheck shell=bash
# Sourced by recipes that compare settings on text: a corpus for machines without one, stages of
# training, and the measurements. They read OUT, RUNS, LENGTH and the preset's lists.

source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/recipe.sh"

# The settings that recipes compare; p is DROPOUT_RATE.
declare -A VARIANT_ARGS=(
    [wd]="--weight-decay 0.1"
    [no_wd]="--weight-decay 0.0"
    [pn_d]="--weight-decay 0.0 --dropout-variant pre_norm --dropout-rate DROPOUT_RATE"
    [pl_d]="--weight-decay 0.0 --dropout-variant pre_linear --dropout-rate DROPOUT_RATE"
    [vpad]="--weight-decay 0.0 --dropout-variant vpad --dropout-rate DROPOUT_RATE"
)

# source_preset RECIPE NAME...: the preset PRESET of a recipe, one of the names. What it NEEDS is set.
source_preset() {
    local recipe="$1" file name
    shift
    [[ " $* " == *" $PRESET "* ]] || fail "PRESET: found $PRESET; allowed: $(list "$@")"
    file="$(cd "$COMMON_DIR/../presets" && pwd)/${recipe}_$PRESET.sh"
    # shellcheck source=/dev/null
    source "$file"
    for name in "${NEEDS[@]}"; do
        [ -n "${!name:-}" ] || fail "$name: not given; PRESET=$PRESET needs it, see $file"
    done
}

# list WORD...: words with commas between them.
list() {
    printf '%s' "$1"
    shift
    printf ', %s' "$@"
}

# check_runs: RUNS, which the recipe sets, names settings.
check_runs() {
    local name
    # shellcheck disable=SC2153
    for name in $RUNS; do
        [ -n "${VARIANT_ARGS[$name]:-}" ] ||
            fail "RUNS: found $name; allowed: wd, no_wd, pn_d, pl_d, vpad"
    done
}

# settings_of NAME: the flags of a setting.
settings_of() {
    echo "${VARIANT_ARGS[$1]//DROPOUT_RATE/$DROPOUT_RATE}"
}

# tiny_corpus PART...: a corpus with no download and a tokenizer; the parts as indexed datasets.
tiny_corpus() {
    local part
    HELDOUT="$OUT/corpus/heldout.jsonl"
    TOKENIZER="$OUT/tokenizer/tokenizer.model"
    headline "corpus and tokenizer"
    if [ ! -f "$HELDOUT" ]; then
        python_tool tools/data/tiny_corpus.py --output "$OUT/corpus" --force "${CORPUS_ARGS[@]}"
    fi
    if [ ! -f "$TOKENIZER" ]; then
        python_tool tools/data/train_tokenizer.py --input "$OUT/corpus/train.jsonl" \
            --vocab-size "$VOCABULARY" --output "$TOKENIZER"
    fi
    for part in "$@"; do
        if [ ! -f "$OUT/data/$part.idx" ]; then
            python_tool tools/data/preprocess.py --input "$OUT/corpus/$part.jsonl" \
                --tokenizer "$TOKENIZER" --output-prefix "$OUT/data/$part" --force
        fi
    done
    MODEL_ARGS+=(--tokenizer-model "$TOKENIZER")
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

# import_model LOAD REVISION FOLDER: a Hugging Face model as a checkpoint, made by the main node. The
# tokenizer is the model's own, or TOKENIZER.
import_model() {
    local revision=()
    headline "base model: $1"
    [ -d "$1" ] || [ -z "$2" ] || revision=(--revision "$2")
    if main_node && ! has_checkpoint "$3"; then
        python_tool tools/checkpoint/convert.py to-megatron --load "$1" "${revision[@]}" --save "$3"
    fi
    until has_checkpoint "$3" || [ "${DRY_RUN:-0}" = 1 ]; do sleep 10; done
    MODEL_ARGS+=(--tokenizer-model "${TOKENIZER:-$3/release/tokenizer}")
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
    if [ -n "${NEEDLE_ARGS[*]:-}" ]; then
        python_tool tools/evaluate/needle.py --model "$folder/huggingface" \
            --train-length "$LENGTH" --output "$folder/needle" "${NEEDLE_ARGS[@]}"
    fi
}

# prepared: the environment and OUT exist.
prepared() {
    if [ "${DRY_RUN:-0}" = 1 ]; then
        PYTHON="${PYTHON:-python3}"
    else
        lengen_setup base
        mkdir -p "$OUT"
    fi
}

# report TITLE: measure every model of RUNS, and one report on all of them.
report() {
    local name reports=()
    main_node || return 0
    for name in $RUNS; do
        measure "$name"
        reports+=("$name=$OUT/$name")
    done
    headline "report"
    python_tool tools/evaluate/report.py --runs "${reports[@]}" --output "$OUT" \
        --train-length "$LENGTH" --title "$1"
    headline "done: $OUT/report.md, report.json, report.png"
}
