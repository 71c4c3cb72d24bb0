# The paper's run: SmolLM3-3B, stage 3, continued on 1B tokens of DCLM-Edu at 4096 tokens with a
# window of 4096 on its rotary layers (Table 6, row "SmolLM3, SW"). One H100 node or more.
#   BASE      Hugging Face folder or hub id (HuggingFaceTB/SmolLM3-3B-checkpoints)
#   REVISION  revision of a hub id (stage3-step-4720000)
#   DATA      prefix of the indexed dataset (tools/data/preprocess.py writes it)
#   HELDOUT   long documents for the loss by position (.jsonl, .txt, .parquet)
#   TP, PP    tensor- and pipeline-parallel sizes (default 1)

NEEDS=(BASE DATA)
LENGTH=4096
WINDOW=4096
CPT_ITERS="${CPT_ITERS:-954}"    # x 256 rows x 4096 tokens = 1.0B tokens
DROPOUT_RATE="${DROPOUT_RATE:-0.3}"
REVISION="${REVISION:-stage3-step-4720000}"
TP="${TP:-1}"

MODEL_ARGS=(
    --seq-length "$LENGTH"
    --max-position-embeddings 65536
    --no-rope-freq 4
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "${PP:-1}"
)
if [ "$TP" -gt 1 ]; then
    MODEL_ARGS+=(--sequence-parallel)
fi
TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size 256
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity selective
    --adam-beta2 0.95
    --clip-grad 1.0
    --eval-iters 4
    --eval-interval 200
    --save-interval 200
)
CPT_ARGS=(
    --train-iters "$CPT_ITERS"
    --lr 2e-5
    --lr-decay-style constant
    --lr-warmup-fraction 0.1
)
POSITION_ARGS=(--documents 200 --bucket 512)
NEEDLE_ARGS=(--style niah --digits 7 --key-words 2 --samples 100)
