#!/usr/bin/env bash
# Mamba2 from scratch on text (Table 6 of the paper, row "Mamba2-85M"): weight decay, none, and
# none with dropout in front of the input projections; then Hugging Face folders, evaluation beyond
# the training length, and a report with a picture.
#
#   bash examples/mamba2_85m_pile.sh                                       a tiny model, anywhere
#   PRESET=85m DATA=PREFIX TOKENIZER=EleutherAI/gpt-neox-20b HELDOUT=FILE \
#       bash examples/mamba2_85m_pile.sh                                   the paper's run, on GPUs
#
# Interrupted and started again, it goes on where it was.
#   PRESET   tiny (default) or 85m
#   OUT      output folder (default runs/mamba2_PRESET_pile)
#   RUNS     which settings, of wd no_wd pn_d pl_d vpad (default: wd no_wd vpad)
#   DRY_RUN  1 prints the commands and runs nothing
# Nodes and processes come from torchrun's, Slurm's or Kubernetes' variables (common/launch.sh).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/common/comparison.sh"

PRESET="${PRESET:-tiny}"
OUT="${OUT:-runs/mamba2_${PRESET}_pile}"
RUNS="${RUNS:-wd no_wd vpad}"
TRAIN_SCRIPT=pretrain_mamba.py
source_preset mamba2_scratch tiny 85m
check_runs

# A corpus with no download, and a tokenizer of its own.
prepare_tiny() {
    tiny_corpus train valid
    DATA_ARGS=(--train-data-path "$OUT/data/train" --valid-data-path "$OUT/data/valid")
}

prepare_85m() {
    MODEL_ARGS+=(--tokenizer-model "$TOKENIZER")
    DATA_ARGS=(--data-path "$DATA" --split 999,1,0)
}

prepared
"prepare_$PRESET"
for name in $RUNS; do
    read -ra settings <<<"$(settings_of "$name")"
    headline "$name: $STEPS iterations of $LENGTH tokens (${settings[*]})"
    stage "$OUT/$name" "$STEPS" "" "${DATA_ARGS[@]}" "${settings[@]}"
done
report "Mamba2 ($PRESET) from scratch"
