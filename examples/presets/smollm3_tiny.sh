# A SmolLM3-shaped model that two CPU cores train in minutes, and the comparison at its size.
# The shape is SmolLM3's: grouped-query attention, SwiGLU, tied embeddings, rotary layers that get
# a window of the training length, every fourth layer without positions and global.

LENGTH=256    # training length in tokens; evaluation goes to 16 times this
WINDOW=256    # window of the rotary layers in keys, equal to the length as in the paper
VOCABULARY=2048
BASE_ITERS=700
CPT_ITERS=150
DROPOUT_RATE=0.3

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --num-query-groups 2
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --no-rope-freq 4
    --seq-length "$LENGTH"
)
TRAINING_ARGS=(
    --micro-batch-size 8
    --global-batch-size 16
    --adam-beta2 0.95
    --clip-grad 1.0
    --num-workers 0
    --log-interval 25
    --eval-iters 8
    --eval-interval 0
    --save-interval 100
)
BASE_ARGS=(
    --train-iters "$BASE_ITERS"
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
)
# As in the paper, a constant rate a little below the one that pre-training ended with.
CPT_ARGS=(
    --train-iters "$CPT_ITERS"
    --lr 3e-4
    --lr-decay-style constant
    --lr-warmup-fraction 0.1
)
CORPUS_ARGS=(--needle-share 0.3 --needle-style niah --needle-digits 4 --needle-length 96 160 224)
POSITION_ARGS=(--documents 40 --bucket 64)
NEEDLE_ARGS=(--style niah --digits 4 --samples 50)
