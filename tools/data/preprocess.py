"""Tokenize text into Megatron's indexed dataset: writes P.bin and P.idx for --data-path P.

Example:
    python tools/data/preprocess.py --input train.jsonl docs/ \\
        --tokenizer HuggingFaceTB/SmolLM3-3B --output-prefix data/train --workers 8
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import BadInput, Parser, run_main


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="preprocess.py",
        description="Tokenize text files (a document each), JSON lines and parquet into an indexed "
        "dataset. Every document ends with one end-of-document token.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files or folders (walked, sorted): .jsonl, .json (lines), .parquet, any other text; "
        "also .gz",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="P", help="writes P.bin and P.idx"
    )
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        metavar="PATH_OR_ID",
        help="folder or hub id of a Hugging Face tokenizer, a SentencePiece .model file, or byte",
    )
    parser.add_argument(
        "--tokenizer-type",
        metavar="TYPE",
        help="Megatron-LM's name for the kind (default: found from --tokenizer)",
    )
    parser.add_argument("--revision", help="revision of a hub id")
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer only")
    parser.add_argument(
        "--text-key",
        "--json-keys",
        default="text",
        metavar="KEY",
        help="field of a JSON line or parquet column (default: text)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: by the amount of text)"
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a broken line: stop and name it, or skip and count it (default: stop)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--append-eod", action="store_true", help="always done; accepted for Megatron-LM's scripts"
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.tokenizer is None and args.tokenizer_type is None:
        raise BadInput("--tokenizer: found none; allowed: a folder, hub id, .model file, or byte")

    from megatron_lengen.data.preprocess import REPORTED, TokenizerSpec, preprocess

    spec = TokenizerSpec(
        args.tokenizer or args.tokenizer_type, args.tokenizer_type, args.vocab_size, args.revision
    )
    summary = preprocess(
        args.input,
        spec,
        args.output_prefix,
        text_key=args.text_key,
        workers=args.workers,
        on_error=args.on_error,
        force=args.force,
    )
    for problem in summary.broken[:REPORTED]:
        print(f"skipped {problem}", file=sys.stderr)
    if len(summary.broken) > REPORTED:
        print(f"and {len(summary.broken) - REPORTED} more", file=sys.stderr)
    print(f"wrote {args.output_prefix}.bin and .idx\n{summary}")
    return 0


if __name__ == "__main__":
    run_main(main)
