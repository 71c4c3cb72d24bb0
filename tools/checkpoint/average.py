"""Average the weights of several checkpoints or Hugging Face models, without training.

    python tools/checkpoint/average.py --load CKPT --last 10 --save DIR
    python tools/checkpoint/average.py --load CKPT --iterations 800,900,1000 --save DIR
    python tools/checkpoint/average.py --load ORG/NAME@STEP-1,STEP-2,STEP-3 --save DIR

Checkpoints give a checkpoint (`release/`: train from it, convert it, evaluate it), Hugging Face
models a Hugging Face folder. Sums are float64; memory holds one tensor and its sum.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Last: this folder's inspect.py must not stand for Python's own module of that name.
sys.path.sort(key=str(Path(__file__).resolve().parent).__eq__)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, run_main


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="average.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--load",
        required=True,
        nargs="+",
        action="extend",
        metavar="MODEL",
        help="a run's folder with --last or --iterations; or several models, the oldest first: "
        "iterations (or runs, whose newest counts), Hugging Face folders, hub ids with revisions "
        "(ID@R1,R2,R3 or 'ID@R1 R2 R3')",
    )
    parser.add_argument("--save", required=True, help="folder for the mean")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, metavar="K", help="the newest K iterations")
    which.add_argument("--iterations", type=_numbers(int), metavar="A,B,C", help="these iterations")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--weights",
        type=_numbers(float),
        metavar="W1,W2",
        help="one for each model, divided by their sum (above 0; single ones may be negative, as "
        "in --weights=-1,2); default: all equal",
    )
    how.add_argument(
        "--exponential",
        type=float,
        metavar="D",
        help="weights 1 for the last model, D for the one before, D^2, ...",
    )
    parser.add_argument(
        "--dtype",
        default="keep",
        choices=["keep", "bf16", "fp32"],
        help="of the mean; Mamba2's A_log, D and dt_bias keep their own",
    )
    parser.add_argument("--force", action="store_true", help="replace what an earlier run wrote")
    return parser.parse_args(argv)


def _numbers(kind: type):
    def numbers(text: str) -> list:
        return [kind(part) for part in text.replace(",", " ").split()]

    numbers.__name__ = "comma list of numbers"  # what argparse calls it in errors
    return numbers


def main() -> None:
    """Average once."""
    args = parse_arguments()
    from megatron_lengen.convert.averaging import average

    average(
        args.load,
        args.save,
        last=args.last,
        iterations=args.iterations,
        weights=args.weights,
        decay=args.exponential,
        dtype=args.dtype,
        force=args.force,
    )


if __name__ == "__main__":
    run_main(main)
