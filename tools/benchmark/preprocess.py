"""Tokens and bytes a second of tools/data/preprocess.py, by workers, beside its tokenizer alone.

Three forms for each number of workers: ours (read, tokenize, write an indexed dataset), the library
`tokenizers` on texts that lie in memory, as many threads as workers, and the limit: the same bytes
read and written and nothing done to them. Workers of ours are processes that start anew, which
counts. All run once per round, in turn, and the shortest of each one's times counts. Ratios are to
ours of the same number of workers, so 0.5 means in half the time. The files that ours writes must
be the same for every number of workers.

Example:
    python tools/benchmark/preprocess.py --size 32 --workers 1 2 --json preprocess.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timing import report_file, write_report

from megatron_lengen.data.corpus import read_library
from megatron_lengen.data.preprocess import TokenizerSpec, preprocess
from megatron_lengen.data.texts import find_files, read_texts
from megatron_lengen.errors import Fault, Parser, require, run_main

END = "<|endoftext|>"
SUFFIXES = (".bin", ".idx")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="preprocess.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--input", nargs="+", metavar="PATH", help="text (default: Python's own library, repeated)"
    )
    parser.add_argument(
        "--size", type=float, default=16, help="MB of text without --input (default: 16)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH_OR_ID",
        help="a fast tokenizer of Hugging Face (default: byte-level BPE, trained here)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=8192, help="of the one trained here (default: 8192)"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--folder", help="where files go (default: the folder for temporary ones)")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


# ---- what is tokenized ---------------------------------------------------------------------------


def make_corpus(file: Path, size: float) -> None:
    """JSON lines with so many MB of text: the standard library, again and again.

    Raises:
        Fault: where this Python has no library to read.
    """
    library = list(read_library().values())
    if not library:
        raise Fault("found no text in Python's library; name some with --input")
    left = size * 1e6
    with open(file, "w", encoding="utf-8") as lines:
        while left > 0:
            for text in library:
                lines.write(json.dumps({"text": text}) + "\n")
                left -= len(text.encode())
                if left <= 0:
                    break


def train_tokenizer(folder: Path, texts: Iterator[str], vocab_size: int) -> None:
    """Byte-level BPE in Hugging Face's format, which splits text as GPT-2 does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


# ---- the forms -----------------------------------------------------------------------------------


def ours(inputs: list[str], tokenizer: str, prefix: Path, workers: int) -> dict[str, Any]:
    """Seconds, tokens and bytes of text of one run, which leaves its dataset at `prefix`."""
    start = time.perf_counter()
    done = preprocess(inputs, TokenizerSpec(tokenizer), prefix, workers=workers, force=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": done.tokens, "text_bytes": done.text_bytes}


def library(inputs: list[str], tokenizer: str, threads: int, repeat: int) -> dict[str, Any]:
    """The same of `encode_batch` in this process, which must be new: its threads stay as many."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    require(loaded.is_fast, f"--tokenizer: found {tokenizer}, which is no fast tokenizer")
    texts = list(read_texts(inputs))
    best, tokens = float("inf"), 0
    for _ in range(repeat):
        start = time.perf_counter()
        encoded = loaded.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        tokens = sum(len(one.ids) for one in encoded)
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "tokens": tokens, "text_bytes": sum(len(t.encode()) for t in texts)}


def in_new_process(*arguments: Any) -> dict[str, Any]:
    """`library`, called in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(library, arguments)


def read_and_write(sources: list[Path], written: list[Path], target: Path) -> float:
    """Seconds in which the sources are read, and as many bytes as `written` holds are written."""
    blocks = [path.read_bytes() for path in written]
    start = time.perf_counter()
    for path in sources:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 22):
                pass
    for number, block in enumerate(blocks):
        (target / str(number)).write_bytes(block)
    seconds = time.perf_counter() - start
    for number in range(len(blocks)):
        (target / str(number)).unlink()
    return seconds


def hashes(prefix: Path) -> list[str]:
    """Of the dataset's two files."""
    found = []
    for suffix in SUFFIXES:
        with open(f"{prefix}{suffix}", "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return found


# ---- measuring -----------------------------------------------------------------------------------


def measure(args: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    """One result for each number of workers and form.

    Raises:
        Fault: where two numbers of workers write other bytes.
    """
    inputs, tokenizer = args.input, args.tokenizer
    if inputs is None:
        make_corpus(place / "text.jsonl", args.size)
        inputs = [str(place / "text.jsonl")]
    if tokenizer is None:
        train_tokenizer(place / "tokenizer", iter(read_library().values()), args.vocab_size)
        tokenizer = str(place / "tokenizer")
    best: dict[tuple[int, str], dict[str, Any]] = {}

    def keep(workers: int, form: str, found: dict[str, Any]) -> None:
        before = best.get((workers, form), found)
        best[workers, form] = min(before, found, key=lambda one: one["seconds"])

    written: list[str] = []
    for _ in range(args.repeat):
        for workers in args.workers:
            prefix = place / "dataset"
            keep(workers, "ours", ours(inputs, tokenizer, prefix, workers))
            if written not in ([], hashes(prefix)):
                raise Fault(f"{workers} workers write other bytes than {args.workers[0]}")
            written = hashes(prefix)
            keep(workers, "tokenizers", in_new_process(inputs, tokenizer, workers, 1))
            sources, _ = find_files(inputs)
            files = [Path(f"{prefix}{suffix}") for suffix in SUFFIXES]
            amount = {key: best[workers, "ours"][key] for key in ("tokens", "text_bytes")}
            seconds = read_and_write(sources, files, place)
            keep(workers, "limit", {"seconds": seconds, **amount})
    return [row(best, workers, form) for workers, form in best]


def row(best: dict[tuple[int, str], dict[str, Any]], workers: int, form: str) -> dict[str, Any]:
    """One result."""
    found = best[workers, form]
    return {
        "workers": workers,
        "form": form,
        **found,
        "tokens_per_second": found["tokens"] / found["seconds"],
        "megabytes_per_second": found["text_bytes"] / 1e6 / found["seconds"],
        "ratio": found["seconds"] / best[workers, "ours"]["seconds"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as text."""
    lines = [
        f"{'workers':>7}  {'form':<10}  {'seconds':>8}  {'tokens/s':>11}  {'MB/s':>8}  "
        f"{'to ours':>7}"
    ]
    for found in results:
        lines.append(
            f"{found['workers']:>7}  {found['form']:<10}  {found['seconds']:>8.3f}  "
            f"{found['tokens_per_second']:>11.0f}  {found['megabytes_per_second']:>8.2f}  "
            f"{found['ratio']:>7.4f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    require(args.size > 0, f"--size: found {args.size}; allowed: above 0")
    require(args.repeat >= 1, f"--repeat: found {args.repeat}; allowed: 1 or more")
    require(min(args.workers) >= 1, f"--workers: found {min(args.workers)}; allowed: 1 or more")
    require(args.vocab_size >= 300, f"--vocab-size: found {args.vocab_size}; allowed: 300 or more")
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        results = measure(args, Path(place))
    amount = results[0]
    print(
        f"{amount['text_bytes'] / 1e6:.1f} MB of text, {amount['tokens']} tokens; the same bytes "
        f"from {' and '.join(map(str, args.workers))} workers"
    )
    print(table(results))
    write_report(args.json, vars(args), identical=True, results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
