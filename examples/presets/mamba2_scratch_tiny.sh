# A Mamba2 that two CPU cores train in a minute or two, and the comparison at its size.

NEEDS=()
LENGTH=128    # training length in tokens; evaluation goes to 64 times this
VOCABULARY=2048
STEPS="${STEPS:-300}"
DROPOUT_RATE=0.1

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --mamba-head-dim 32
    --mamba-state-dim 64
    --seq-length "$LENGTH"
)
TRAINING_ARGS=(
    --train-iters "$STEPS"
    --global-batch-size 16
    --micro-batch-size 16
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --num-workers 0
    --log-interval 25
    --eval-iters 8
    --eval-interval 0
    --save-interval 200
)
CORPUS_ARGS=(--needle-share 0)
POSITION_ARGS=(--documents "${DOCUMENTS:-10}" --max-length "$((64 * LENGTH))" --bucket 64)
NEEDLE_ARGS=()
