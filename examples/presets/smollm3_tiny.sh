# A SmolLM3-shaped model that two CPU cores train in minutes, and the comparison at its size.
# The shape is SmolLM3's: grouped-query attention, SwiGLU, tied embeddings, rotary layers that get
# a window of the training length, every fourth layer without positions and global.

NEEDS=()
LENGTH=256    # training length in tokens; evaluation goes to 16 times this
WINDOW=256    # window of the rotary layers in keys, equal to the length as in the paper
VOCABULARY=2048
RECALL_ITERS="${RECALL_ITERS:-1200}"
BASE_ITERS="${BASE_ITERS:-500}"
CPT_ITERS="${CPT_ITERS:-200}"
DROPOUT_RATE=0.1    # as the paper takes for its small models

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --num-query-groups 2
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --init-method-std 0.08
    --no-rope-freq 4
    --seq-length "$LENGTH"
)
TRAINING_ARGS=(
    --micro-batch-size 8
    --adam-beta2 0.95
    --clip-grad 1.0
    --num-workers 0
    --log-interval 25
    --eval-iters 8
    --eval-interval 0
    --save-interval 200
)
# Two thirds of the time of fp32, on processors that multiply bf16 matrices.
if fast_bf16; then
    TRAINING_ARGS+=(--bf16)
fi
# Recall first, on needle documents alone: mixed into text it takes this size far longer to learn.
RECALL_ARGS=(
    --global-batch-size 8
    --train-iters "$RECALL_ITERS"
    --lr 3e-3
    --lr-decay-style constant
    --lr-warmup-fraction 0.0417
    --weight-decay 0.1
)
BASE_ARGS=(
    --global-batch-size 16
    --train-iters "$BASE_ITERS"
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
)
# As in the paper, a constant rate, of the size of the one that pre-training ended with.
CPT_ARGS=(
    --global-batch-size 16
    --train-iters "$CPT_ITERS"
    --lr 6e-4
    --lr-decay-style constant
    --lr-warmup-fraction 0.1
)
CORPUS_ARGS=(--needle-share 0.55 --needle-style niah --needle-digits 2
    --needle-length 128 136 144 152 192 248 --needle-questions 4)
TEXT_SHARE=0.7 NEEDLE_SHARE=0.3    # of training rows, after the recall stage
POSITION_ARGS=(--documents "${DOCUMENTS:-40}" --bucket 64)
NEEDLE_ARGS=(--style niah --digits 2 --samples "${SAMPLES:-50}")
