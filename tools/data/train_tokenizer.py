"""Train a SentencePiece BPE tokenizer that loses nothing (bytes for unknown characters).

Example:
    python tools/data/train_tokenizer.py --input data/tiny/train.jsonl --vocab-size 4096 \\
        --output data/tiny/tokenizer.model
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, run_main


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="train_tokenizer.py",
        description="Train a SentencePiece model on text, JSON lines or parquet. Digits stay "
        "single; id 2 ends a document.",
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files or folders, as preprocess"
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="300 or more")
    parser.add_argument("--output", required=True, metavar="FILE", help="the .model file to write")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="field or column (default: text)"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


def main() -> int:
    args = build_parser().parse_args()

    from megatron_lengen.data.sentencepiece_tools import check_model_path, train_sentencepiece
    from megatron_lengen.data.texts import read_texts

    path = check_model_path(args.output, args.force)
    size = train_sentencepiece(read_texts(args.input, args.text_key), args.vocab_size, path)
    print(f"wrote {path}: {size} pieces")
    return 0


if __name__ == "__main__":
    run_main(main)
