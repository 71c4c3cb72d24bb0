"""Join indexed datasets of one tokenizer: writes P.bin and P.idx with all their documents.

Example:
    python tools/data/merge.py --input data/a data/b --output-prefix data/ab
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, run_main


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="merge.py", description="Join indexed datasets, in the order given.")
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="datasets, without suffix"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="P", help="writes P.bin and P.idx"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    from megatron_lengen.data.indexed import merge_datasets

    documents = merge_datasets(args.input, args.output_prefix, args.force)
    print(f"wrote {args.output_prefix}.bin and .idx: {documents} documents")
    return 0


if __name__ == "__main__":
    run_main(main)
