"""Text into Megatron's indexed dataset: read, tokenize in parallel, write in order.

Each document becomes its ids and one end-of-document id. The bytes written do not depend on the
number of workers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron_lengen.data.indexed import DatasetWriter, check_new_prefix, dtype_for
from megatron_lengen.data.texts import Batch, decode_batch, find_files, read_batches
from megatron_lengen.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lengen.errors import BadInput, require
from megatron_lengen.runtime.cores import available_cores

# A worker pays for itself (it imports transformers) from about this much input on.
BYTES_PER_WORKER = 16 << 20
REPORTED = 10


@dataclass(frozen=True)
class TokenizerSpec:
    """The arguments of `build_tokenizer`, to be sent to workers."""

    name: str
    kind: str | None = None
    vocab_size: int | None = None
    revision: str | None = None

    def build(self) -> Tokenizer:
        return build_tokenizer(self.name, self.kind, self.vocab_size, self.revision)


@dataclass(frozen=True)
class Job:
    """What each batch needs besides its items."""

    tokenizer: TokenizerSpec
    text_key: str
    dtype: type[np.number]


@dataclass
class Summary:
    """Counts of a run: documents kept, items skipped by reason, broken items, tokens, bytes."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    binary_files: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [
            f"documents kept:  {self.documents}",
            f"empty, skipped:  {self.skipped['empty']}",
            f"broken, skipped: {len(self.broken)}",
            f"tokens:          {self.tokens} (with one end-of-document token per document)",
            f"text:            {self.text_bytes / 1e6:.2f} MB, {rate:.2f} MB/s",
        ]
        for reason in ("without the key", "blank line"):
            if self.skipped[reason]:
                lines.append(f"{reason}: {self.skipped[reason]} skipped")
        if self.binary_files:
            lines.append(f"binary files in folders: {self.binary_files} left out")
        return "\n".join(lines)


@dataclass
class Encoded:
    """A batch as ids [n] with the documents' lengths [d], and what was left out of it."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int
    skipped: Counter[str]
    broken: list[str]


def preprocess(
    inputs: list[str],
    tokenizer: TokenizerSpec,
    output_prefix: str | Path,
    *,
    text_key: str = "text",
    workers: int | None = None,
    on_error: str = "stop",
    force: bool = False,
) -> Summary:
    """Write the documents of `inputs` (files and folders) to the dataset at `output_prefix`.

    Args:
        workers: processes that tokenize; None chooses by the amount of text and the processors.
        on_error: `stop` at the first broken item, or `skip` it and count it.
    Raises:
        BadInput: bad arguments, broken input (named by path and line), or nothing to write.
    """
    require(on_error in ("stop", "skip"), f"--on-error: found {on_error}; allowed: stop, skip")
    require(workers is None or workers >= 1, f"--workers: found {workers}; allowed: 1 or more")
    check_new_prefix(output_prefix, force)
    files, binary = find_files(inputs)
    built = tokenizer.build()
    job = Job(tokenizer, text_key, dtype_for(built.vocab_size))
    summary = Summary(binary_files=len(binary))
    workers = workers or _worker_count(files)
    started = time.perf_counter()
    with (
        DatasetWriter(output_prefix, job.dtype, force) as writer,
        tqdm(unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar,
    ):
        for part in _encode_all(read_batches(files, text_key), job, workers):
            if part.broken and on_error == "stop":
                raise BadInput(f"{part.broken[0]} (--on-error skip goes on without it)")
            writer.add_documents(part.tokens, part.lengths)
            summary.documents += len(part.lengths)
            summary.tokens += len(part.tokens)
            summary.text_bytes += part.text_bytes
            summary.skipped += part.skipped
            summary.broken += part.broken
            bar.update(part.text_bytes)
        _require_documents(summary, text_key)
    summary.seconds = time.perf_counter() - started
    return summary


def _require_documents(summary: Summary, text_key: str) -> None:
    if summary.documents:
        return
    if summary.skipped["without the key"]:
        raise BadInput(f"--text-key: found no line with the key {text_key!r}")
    raise BadInput(
        f"--input: found no document with text ({summary.skipped.total()} skipped, "
        f"{len(summary.broken)} broken)"
    )


def _worker_count(files: list[Path]) -> int:
    size = sum(path.stat().st_size for path in files)
    return max(1, min(available_cores(), size // BYTES_PER_WORKER))


def _encode_all(batches: Iterable[Batch], job: Job, workers: int) -> Iterator[Encoded]:
    """Encode batches in order, in this process or in `workers` others, a few batches ahead."""
    if workers == 1:
        yield from (encode_batch(batch, job) for batch in batches)
        return
    # Workers start anew rather than as copies: copying a process that has threads can hang it.
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            waiting.append(executor.submit(encode_batch, batch, job))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def encode_batch(batch: Batch, job: Job) -> Encoded:
    """Decode and tokenize a batch; every document ends with exactly one end-of-document id."""
    tokenizer = _built(job.tokenizer)
    decoded = decode_batch(batch, job.text_key)
    documents: list[np.ndarray] = []
    text_bytes = 0
    for line, text in decoded.texts:
        try:
            ids = tokenizer.encode(text)
        except BadInput as error:
            decoded.broken.append(f"{batch.path}:{line}: {error}")
            continue
        # A text may spell the end-of-document token itself.
        while ids and ids[-1] == tokenizer.eod:
            ids.pop()
        if not ids:
            decoded.skipped["empty"] += 1
            continue
        text_bytes += len(text.encode("utf-8"))
        documents.append(np.array([*ids, tokenizer.eod], dtype=job.dtype))
    return Encoded(
        tokens=np.concatenate(documents) if documents else np.empty(0, job.dtype),
        lengths=np.array([len(document) for document in documents], dtype=np.int64),
        text_bytes=text_bytes,
        skipped=decoded.skipped,
        broken=decoded.broken,
    )


@cache
def _built(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer of `spec`, built once in each process."""
    return spec.build()
