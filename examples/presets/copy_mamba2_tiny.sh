# A Mamba2 of 0.37 million parameters and sources of 10 to 20 letters: the comparison in minutes on
# two CPU cores. It learns to copy in part; differences between the settings show all the same.

STEPS="${STEPS:-1500}"
SEEDS="${SEEDS:-1 2}"
JOBS="${JOBS:-2}"    # two models on a core each are quicker than one on both

MODEL_ARGS=(
    --num-layers 3
    --hidden-size 128
    --mamba-head-dim 32
    --mamba-state-dim 64
    --untie-embeddings-and-output-weights
    --copy-task 10-20
)
TRAINING_ARGS=(
    --train-iters "$STEPS"
    --global-batch-size 64
    --micro-batch-size "$((total < 64 ? 64 / total : 1))"
    --lr 1e-3
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --adam-beta2 0.95
    --clip-grad 1.0
    --num-workers 0
    --log-interval 100
    --eval-iters 0
    --save-interval 250
    --keep-last 1
)
# Less time than fp32, on processors that multiply bf16 matrices.
if fast_bf16; then
    TRAINING_ARGS+=(--bf16)
fi
EVALUATION_ARGS=(--lengths 20,30,40,60 --samples "${SAMPLES:-300}")
