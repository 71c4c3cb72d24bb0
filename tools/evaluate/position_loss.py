"""Loss by position on long held-out documents: writes results.json and position_loss.png.

Example:
    python tools/evaluate/position_loss.py --model RUN/hf --data heldout.jsonl \\
        --max-length 4096 --train-length 256 --output RUN/position_loss
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.evaluation import results, sources


def build_parser() -> Parser:
    parser = Parser(
        prog="position_loss.py",
        description="Cross-entropy by position on long documents. Only documents with at least "
        "--max-length tokens count, cut to that length.",
    )
    results.add_model_arguments(parser)
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="PATH",
        help='.jsonl files ({"text": ...}), text files (a document each), or folders of them',
    )
    group.add_argument("--text-key", default="text", help="field of a JSON line (default: text)")
    group.add_argument(
        "--max-length",
        type=results.positive,
        metavar="N",
        help="tokens of each document (default: the model's max_position_embeddings)",
    )
    group.add_argument(
        "--documents", type=results.positive, metavar="K", help="use the first K (default: all)"
    )
    group.add_argument(
        "--bucket",
        type=results.positive,
        metavar="B",
        help="positions in a window (default: N / 32, at most 512)",
    )
    group.add_argument(
        "--train-length",
        type=results.positive,
        metavar="T",
        help="training length, drawn and used for means (default: the checkpoint's, if it is one)",
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    require(
        args.max_length is None or args.max_length >= 2, "--max-length: found 1; allowed: 2 or more"
    )
    source = sources.find_model(args.model, args.iteration, args.revision)
    for path in args.data:
        require(Path(path).exists(), f"--data: {path} does not exist")
    settings = {
        "task": "position_loss",
        "model": source.identity(),
        "data": [Path(path).name for path in args.data],
        "data_fingerprint": sources.fingerprint(args.data),
        "text_key": args.text_key,
        "max_length": args.max_length,
        "documents": args.documents,
        "bucket": args.bucket,
        "train_length": args.train_length or sources.training_length(source),
        **results.model_settings(args),
    }
    from megatron_lengen.evaluation import position_loss

    def measure(folder: Path) -> dict:
        return evaluate(args, source, settings["train_length"])

    found = results.measure_once(args.output, settings, args.force, measure, position_loss.draw)
    print(position_loss.table(found))
    return 0


def evaluate(
    args: argparse.Namespace, source: sources.ModelSource, train_length: int | None
) -> dict:
    """Load, read the documents, measure."""
    from megatron_lengen.evaluation import model as models
    from megatron_lengen.evaluation import position_loss

    tokenizer = models.load_tokenizer(source, args.tokenizer)
    model = models.load_model(source, args.device, args.dtype)
    length = args.max_length or model.describe()["max_position_embeddings"]
    require(length is not None, "--max-length: the model names no length of its own; give one")
    texts = position_loss.read_documents(args.data, args.text_key)
    documents = position_loss.long_documents(texts, tokenizer, length, args.documents)
    scores = position_loss.evaluate_position_loss(model, documents, args.bucket, train_length)
    return {"model": model.describe(), **scores}


if __name__ == "__main__":
    run_main(main)
