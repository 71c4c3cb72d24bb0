"""Needle in a haystack (RULER's NIAH-1) at several lengths: writes results.json, samples.jsonl
and needle.png.

Example:
    python tools/evaluate/needle.py --model RUN/hf --lengths 256,512,1024,2048,4096 \\
        --samples 100 --train-length 256 --output RUN/needle
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.evaluation import results, sources


def build_parser() -> Parser:
    parser = Parser(
        prog="needle.py",
        description="Recall of a number hidden in a text, by length and depth. Greedy answers; a "
        "sample scores if the number occurs in the output.",
    )
    results.add_model_arguments(parser)
    group = results.add_task_arguments(
        parser, lengths_of="tokens of prompt and answer together", samples=100, batch_tokens=16384
    )
    group.add_argument(
        "--style",
        default="niah",
        choices=("niah", "pairs"),
        help="RULER's sentences, or lines key=value (default: niah)",
    )
    group.add_argument(
        "--haystack",
        metavar="PATH",
        help="text or .jsonl file whose lines hide the needle (default: RULER's noise sentences)",
    )
    group.add_argument(
        "--needles",
        type=results.positive,
        metavar="K",
        help="statements in a text, one of them asked for (default: 1 for niah, 4 for pairs)",
    )
    group.add_argument(
        "--key-words",
        type=int,
        default=1,
        choices=(1, 2),
        help="words in the name of a number (default: 1; RULER has 2)",
    )
    group.add_argument(
        "--digits", type=results.positive, default=7, help="digits of the number (default: 7)"
    )
    group.add_argument(
        "--train-length",
        type=results.positive,
        metavar="T",
        help="training length, drawn in the picture (default: the checkpoint's, if it is one)",
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    require(
        args.haystack is None or Path(args.haystack).exists(),
        f"--haystack: {args.haystack} does not exist",
    )
    source = sources.find_model(args.model, args.iteration, args.revision)
    settings = {
        "task": "needle",
        "model": source.identity(),
        "lengths": args.lengths,
        "samples": args.samples,
        "style": args.style,
        "haystack": sources.fingerprint([args.haystack]) if args.haystack else "noise",
        "digits": args.digits,
        "needles": args.needles,
        "key_words": args.key_words,
        "seed": args.seed,
        "batch_tokens": args.batch_tokens,
        "train_length": args.train_length or sources.training_length(source),
        **results.model_settings(args),
    }
    from megatron_lengen.evaluation import needle

    def measure(folder: Path) -> dict:
        return evaluate(args, source, settings["train_length"], folder)

    found = results.measure_once(args.output, settings, args.force, measure, needle.draw)
    print(needle.table(found))
    return 0


def evaluate(
    args: argparse.Namespace, source: sources.ModelSource, train_length: int | None, folder: Path
) -> dict:
    """Load, make the samples, measure."""
    from megatron_lengen.evaluation import model as models
    from megatron_lengen.evaluation import needle

    tokenizer = models.load_tokenizer(source, args.tokenizer)
    task = needle.NeedleTask(
        style=args.style,
        haystack=needle.read_lines(args.haystack) if args.haystack else None,
        digits=args.digits,
        needles=args.needles,
        key_words=args.key_words,
        seed=args.seed,
    )
    # Before the model: a length that cannot be made should say so at once.
    samples = {n: needle.make_samples(tokenizer, n, args.samples, task) for n in args.lengths}
    model = models.load_model(source, args.device, args.dtype)
    scores, outputs = needle.evaluate_needle(
        model, tokenizer, samples, args.batch_tokens, train_length
    )
    needle.write_outputs(folder / "samples.jsonl", outputs)
    return {"model": model.describe(), **scores}


if __name__ == "__main__":
    run_main(main)
