"""Make a corpus for a tiny run with no download: train, valid, heldout and needles (.jsonl).

The text is the standard library of this Python (PSF-2.0 licence); the needle documents are
generated.

Example:
    python tools/data/tiny_corpus.py --output data/tiny --needle-share 0.3 --needle-length 96 192
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.data.corpus import STYLES, NeedleSettings
from megatron_lengen.errors import Parser, run_main


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiny_corpus.py",
        description="Split Python's standard library into train, validation and long held-out "
        "documents, and make needle documents beside them.",
    )
    default = NeedleSettings()
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the four files")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the needles (0)")
    parser.add_argument(
        "--needle-share",
        type=float,
        default=default.share,
        metavar="X",
        help="needle documents beside text and needle documents together, in characters "
        f"({default.share})",
    )
    parser.add_argument(
        "--needle-length",
        type=int,
        nargs="+",
        default=list(default.lengths),
        metavar="TOKENS",
        help="lengths of needle documents; best below the training length, so that rows seldom "
        f"cut them ({' '.join(map(str, default.lengths))})",
    )
    parser.add_argument(
        "--needle-style",
        choices=STYLES,
        default=default.style,
        help="key=value lines, RULER's sentences, or both where the length allows it "
        f"({default.style})",
    )
    parser.add_argument(
        "--needle-digits", type=int, default=default.digits, help=f"of a value ({default.digits})"
    )
    parser.add_argument(
        "--needles", type=int, default=default.needles, help=f"per document ({default.needles})"
    )
    parser.add_argument(
        "--needle-questions",
        type=int,
        default=default.questions,
        help=f"how often RULER's sentences ask ({default.questions})",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH_OR_ID",
        help="count tokens with it (default: an estimate that suits small vocabularies)",
    )
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def main() -> int:
    args = build_parser().parse_args()

    from megatron_lengen.data.corpus import approximate_encode, make_corpus, write_corpus
    from megatron_lengen.data.tokenizer import build_tokenizer

    settings = NeedleSettings(
        args.needle_share,
        tuple(args.needle_length),
        args.needle_style,
        args.needle_digits,
        args.needles,
        args.needle_questions,
    )
    encode = build_tokenizer(args.tokenizer).encode if args.tokenizer else approximate_encode
    corpus = make_corpus(args.seed, settings, encode)
    write_corpus(corpus, args.output, args.force)
    print(corpus.summary())
    return 0


if __name__ == "__main__":
    run_main(main)
