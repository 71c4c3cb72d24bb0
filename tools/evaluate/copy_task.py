"""Copying of sources of several lengths (Jelassi et al.): writes results.json and copy_task.png.

Example:
    python tools/evaluate/copy_task.py --model runs/copy --lengths 100,150,200,300 --output OUT
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.evaluation import results, sources


def build_parser() -> Parser:
    parser = Parser(
        prog="copy_task.py",
        description="How well a model trained with --copy-task copies sources of given lengths: "
        "greedy answers (exact match, token accuracy), and predictions at each place of the true "
        "answer (forced string and character accuracy).",
    )
    results.add_model_arguments(parser)
    group = results.add_task_arguments(
        parser, lengths_of="letters of the sources", samples=500, batch_tokens=32768
    )
    group.add_argument(
        "--train-lengths",
        metavar="MIN-MAX",
        help="source lengths of training, shaded in the picture (default: the checkpoint's)",
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    require(0 <= args.seed < 2**64, f"--seed: found {args.seed}; allowed: 0 to 2**64 - 1")
    source = sources.find_model(args.model, args.iteration, args.revision)
    settings = {
        "task": "copy_task",
        "model": source.identity(),
        "lengths": args.lengths,
        "samples": args.samples,
        "seed": args.seed,
        "batch_tokens": args.batch_tokens,
        "train_lengths": args.train_lengths or sources.copy_lengths(source),
        **results.model_settings(args),
    }

    def measure(folder: Path) -> dict:
        return evaluate(args, source, settings["train_lengths"])

    def draw(found: dict, path: Path) -> None:
        from megatron_lengen.evaluation import copy_task

        copy_task.draw(found, path)

    found = results.measure_once(args.output, settings, args.force, measure, draw)
    from megatron_lengen.evaluation import copy_task

    print(copy_task.table(found))
    return 0


def evaluate(
    args: argparse.Namespace, source: sources.ModelSource, train_lengths: str | None
) -> dict:
    """Load and measure."""
    from megatron_lengen.data.copy_task import parse_lengths
    from megatron_lengen.evaluation import copy_task
    from megatron_lengen.evaluation import model as models

    trained = parse_lengths(train_lengths, "--train-lengths") if train_lengths else None
    copy_task.check_tokenizer(models.load_tokenizer(source, args.tokenizer))
    model = models.load_model(source, args.device, args.dtype)
    scores = copy_task.evaluate_copy(
        model, args.lengths, args.samples, args.seed, args.batch_tokens, trained
    )
    return {"model": model.describe(), **scores}


if __name__ == "__main__":
    run_main(main)
