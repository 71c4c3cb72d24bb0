#!/usr/bin/env bash
# Continual pre-training of Mamba2 with VPAD (Table 6 of the paper, row "Mamba2-1.3B"), beside weight
# decay and no weight decay; then Hugging Face folders, evaluation beyond the training length, and a
# report with a picture.
#
#   bash examples/mamba2_1_3b_cpt_vpad.sh                                  a tiny model, anywhere
#   PRESET=1_3b BASE=state-spaces/mamba2-1.3b DATA=PREFIX HELDOUT=FILE \
#       TOKENIZER=EleutherAI/gpt-neox-20b bash examples/mamba2_1_3b_cpt_vpad.sh
#                                                                          the paper's run, on GPUs
#
# Interrupted and started again, it goes on where it was.
#   PRESET   tiny (default) or 1_3b
#   OUT      output folder (default runs/mamba2_PRESET_cpt)
#   RUNS     which settings, of wd no_wd pn_d pl_d vpad (default: wd no_wd vpad; vpad for 1_3b)
#   DRY_RUN  1 prints the commands and runs nothing
# Nodes and processes come from torchrun's, Slurm's or Kubernetes' variables (common/launch.sh).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/common/comparison.sh"

PRESET="${PRESET:-tiny}"
OUT="${OUT:-runs/mamba2_${PRESET}_cpt}"
TRAIN_SCRIPT=pretrain_mamba.py
source_preset mamba2_cpt tiny 1_3b

# A base model of this run's size, trained with weight decay.
prepare_tiny() {
    RUNS="${RUNS:-wd no_wd vpad}"
    tiny_corpus train valid
    DATA_ARGS=(--train-data-path "$OUT/data/train" --valid-data-path "$OUT/data/valid")
    headline "base model: $BASE_ITERS iterations"
    stage "$OUT/base" "$BASE_ITERS" "" "${DATA_ARGS[@]}" "${BASE_ARGS[@]}"
}

# The released model, in Hugging Face's form or in mamba-ssm's.
prepare_1_3b() {
    RUNS="${RUNS:-vpad}"
    import_model "$BASE" "${REVISION:-}" "$OUT/base"
    DATA_ARGS=(--data-path "$DATA" --split 999,1,0)
}

prepared
"prepare_$PRESET"
check_runs
for name in $RUNS; do
    read -ra settings <<<"$(settings_of "$name")"
    headline "$name: $CPT_ITERS iterations of $LENGTH tokens (${settings[*]})"
    stage "$OUT/$name" "$CPT_ITERS" "$OUT/base" "${DATA_ARGS[@]}" "${CPT_ARGS[@]}" "${settings[@]}"
done
report "Mamba2 ($PRESET), continual pre-training"
