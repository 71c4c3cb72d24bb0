# The paper's Mamba2-1.3B continued on 0.5B tokens of DCLM-Edu at 2048 tokens (Table 6).
#   BASE       Hugging Face folder or hub id (state-spaces/mamba2-1.3b: mamba-ssm's form)
#   REVISION   revision of a hub id
#   DATA       prefix of the indexed dataset (tools/data/preprocess.py writes it)
#   TOKENIZER  the dataset's tokenizer: a folder or hub id (EleutherAI/gpt-neox-20b)
#   HELDOUT    long documents for the loss by position (.jsonl, .txt, .parquet)
#   TP, PP     tensor- and pipeline-parallel sizes (default 1)

NEEDS=(BASE DATA TOKENIZER)
LENGTH=2048
CPT_ITERS="${CPT_ITERS:-1907}"    # x 128 rows x 2048 tokens = 0.5B tokens
DROPOUT_RATE="${DROPOUT_RATE:-0.1}"    # the paper: 0.1 to 0.3
TP="${TP:-1}"

MODEL_ARGS=(
    --seq-length "$LENGTH"
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "${PP:-1}"
)
if [ "$TP" -gt 1 ]; then
    MODEL_ARGS+=(--sequence-parallel)
fi
TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-2}"
    --global-batch-size 128
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --adam-beta2 0.95
    --clip-grad 1.0
    --eval-iters 4
    --eval-interval 200
    --save-interval 200
)
CPT_ARGS=(
    --train-iters "$CPT_ITERS"
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
)
POSITION_ARGS=(--documents 100 --max-length 131072 --bucket 512)
NEEDLE_ARGS=(--style niah --digits 7 --key-words 2 --samples 100 --lengths 2048,4096,8192,16384)
