# The paper's Mamba2-45M (Table 6): 5 million samples with sources of 50 to 100 letters. Batches of
# 256 rows are read from its "0.3B tokens, 19K a batch" (19,200 = 256 rows x 75 letters). Where it
# says nothing: initial weights are mamba-ssm's, norms, A, D and the steps' biases do not decay,
# embeddings are not tied (tied ones learn later), bf16.
#   MICRO_BATCH_SIZE  rows that a process computes at a time (default 64)

STEPS="${STEPS:-19531}"    # x 256 rows = 5.0M samples
SEEDS="${SEEDS:-1 2 3 4 5}"
JOBS="${JOBS:-1}"

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
    --mamba-head-dim 64
    --mamba-state-dim 128
    --untie-embeddings-and-output-weights
    --copy-task 50-100
)
TRAINING_ARGS=(
    --train-iters "$STEPS"
    --global-batch-size 256
    --micro-batch-size "${MICRO_BATCH_SIZE:-$((total <= 4 ? 64 : total < 256 ? 256 / total : 1))}"
    --bf16
    --lr 1e-3
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --adam-beta2 0.95
    --clip-grad 1.0
    --log-interval 50
    --eval-iters 4
    --eval-interval 1000
    --eval-generation 100,150,300
    --eval-generation-samples 256
    --save-interval 1000
    --keep-last 2
)
EVALUATION_ARGS=(--lengths 100,150,200,300 --samples "${SAMPLES:-1000}")
