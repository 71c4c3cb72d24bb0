# The comparison at a size that two CPU cores train in minutes: a base model first, then each setting.

NEEDS=()
LENGTH=128    # training length in tokens; evaluation goes to 64 times this
VOCABULARY=2048
BASE_ITERS="${BASE_ITERS:-400}"
CPT_ITERS="${CPT_ITERS:-150}"
DROPOUT_RATE=0.1

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --mamba-head-dim 32
    --mamba-state-dim 64
    --seq-length "$LENGTH"
)
TRAINING_ARGS=(
    --global-batch-size 16
    --micro-batch-size 16
    --adam-beta2 0.95
    --clip-grad 1.0
    --num-workers 0
    --log-interval 25
    --eval-iters 8
    --eval-interval 0
    --save-interval 200
)
BASE_ARGS=(
    --train-iters "$BASE_ITERS"
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
)
CPT_ARGS=(
    --train-iters "$CPT_ITERS"
    --lr 6e-4
    --min-lr 6e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
)
CORPUS_ARGS=(--needle-share 0)
POSITION_ARGS=(--documents "${DOCUMENTS:-10}" --max-length "$((64 * LENGTH))" --bucket 64)
NEEDLE_ARGS=()
