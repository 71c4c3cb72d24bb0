# The paper's Mamba2-85M from scratch (Table 6): 25B tokens of The Pile at 1024 tokens. Where it says
# nothing: initial weights are mamba-ssm's, tables are tied (85M), bf16.
#   DATA       prefix of the indexed dataset (tools/data/preprocess.py writes it)
#   TOKENIZER  the dataset's tokenizer: a folder or hub id
#   HELDOUT    long documents for the loss by position (.jsonl, .txt, .parquet)
#   MICRO_BATCH_SIZE  rows that a process computes at a time (default 8)

NEEDS=(DATA TOKENIZER)
LENGTH=1024
STEPS="${STEPS:-47684}"    # x 512 rows x 1024 tokens = 25.0B tokens
DROPOUT_RATE="${DROPOUT_RATE:-0.1}"

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
    --mamba-head-dim 64
    --mamba-state-dim 128
    --make-vocab-size-divisible-by 16
    --seq-length "$LENGTH"
)
TRAINING_ARGS=(
    --train-iters "$STEPS"
    --micro-batch-size "${MICRO_BATCH_SIZE:-8}"
    --global-batch-size 512
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --log-interval 10
    --eval-iters 4
    --eval-interval 1000
    --save-interval 1000
    --keep-last 2
)
POSITION_ARGS=(--documents 100 --max-length 65536 --bucket 512)
NEEDLE_ARGS=(--style niah --digits 7 --key-words 2 --samples 100 --lengths 1024,2048,4096,8192)
