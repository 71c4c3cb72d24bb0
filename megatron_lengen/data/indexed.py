"""Megatron's indexed dataset: written under temporary names, merged, and checked at opening.

A dataset is two files: `P.bin`, the token ids of all documents one after the other, and `P.idx`:
header, length and byte offset of each sequence, and the sequence at which each document ends. The
format and its reader are Megatron-Core's (megatron/core/datasets/indexed_dataset.py), whose import
takes seconds and is therefore done when it is needed.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lengen.errors import BadInput, require

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34  # magic 9, version 8, dtype code 1, sequence count 8, document count 8
# Megatron-Core's dtype codes that can hold token ids.
DTYPES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip


def dtype_for(vocab_size: int) -> type[np.number]:
    """uint16 where the ids fit with room to spare (below 65,500 of them), else int32."""
    from megatron.core.datasets.indexed_dataset import DType

    return DType.optimal_dtype(vocab_size)


class DatasetWriter:
    """Writes documents to a dataset that appears at its prefix only when it is complete.

    Use as a context manager; leaving it by an exception removes what was written.

    Args:
        prefix: the dataset's path without suffix.
        dtype: of the token ids, from `dtype_for`.
        force: replace a dataset that lies there already.
    """

    def __init__(self, prefix: str | Path, dtype: type[np.number], force: bool = False) -> None:
        self.bin, self.idx = check_new_prefix(prefix, force)
        self._temporary = [
            path.with_name(f"{path.name}.tmp{os.getpid()}") for path in (self.bin, self.idx)
        ]
        self._dtype = dtype
        self._builder: Any = None

    def __enter__(self) -> DatasetWriter:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        try:
            self.bin.parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(str(self._temporary[0]), dtype=self._dtype)
        except OSError as error:
            raise BadInput(
                f"--output-prefix: cannot write to {self.bin.parent} ({error.strerror})"
            ) from error
        # Arrays of 4 and 8 bytes an entry: as lists, tens of millions of documents fill the memory.
        self._builder.sequence_lengths = array("i")
        self._builder.document_indices = array("q", [0])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._builder.data_file.close()
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add documents that lie one after the other in `tokens` [n]; `lengths` [d] sums to n."""
        builder = self._builder
        builder.data_file.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        first = len(builder.sequence_lengths) + 1
        builder.sequence_lengths.extend(lengths.tolist())
        builder.document_indices.extend(range(first, first + len(lengths)))

    def add_dataset(self, prefix: str | Path) -> None:
        """Add all documents of another dataset."""
        self._builder.add_index(str(prefix))

    def _publish(self) -> None:
        temporary_bin, temporary_idx = self._temporary
        self._builder.finalize(str(temporary_idx))
        # A reader needs both files, so the index goes first and comes last.
        self.idx.unlink(missing_ok=True)
        temporary_bin.replace(self.bin)
        temporary_idx.replace(self.idx)


def check_new_prefix(prefix: str | Path, force: bool = False) -> tuple[Path, Path]:
    """The .bin and .idx paths of a new dataset; one that exists needs `force`."""
    text = str(prefix)
    if text.endswith((".bin", ".idx")) or not Path(text).name:
        raise BadInput(
            f"--output-prefix: found {text}; allowed: a path without suffix, to which .bin and "
            ".idx are added"
        )
    paths = Path(text + ".bin"), Path(text + ".idx")
    for path in paths:
        require(
            force or not path.exists(),
            f"--output-prefix: found that {path} exists; --force replaces it",
        )
    return paths


def merge_datasets(
    prefixes: Sequence[str | Path], output_prefix: str | Path, force: bool = False
) -> int:
    """Join datasets, document boundaries kept, into a new one; returns its number of documents."""
    require(len(prefixes) > 0, "--input: found none; allowed: one dataset prefix or more")
    sources = [check_dataset(prefix, flag="--input") for prefix in prefixes]
    dtype = sources[0].index.dtype
    for source, prefix in zip(sources, prefixes, strict=True):
        require(
            source.index.dtype == dtype,
            f"--input: found {prefix} with ids as {source.index.dtype.__name__} and {prefixes[0]} "
            f"with {dtype.__name__}; allowed: datasets of one tokenizer",
        )
    with DatasetWriter(output_prefix, dtype, force) as writer:
        for source in sources:
            writer.add_dataset(source.path_prefix)
    return sum(len(source.document_indices) - 1 for source in sources)


def check_dataset(prefix: str | Path, flag: str = "--data-path") -> IndexedDataset:
    """Open the dataset at `prefix`, after a check that its two files are whole and belong together.

    Raises:
        BadInput: a file is missing, empty, cut short, of another format, or of another dataset;
            the message names the file and, where sizes disagree, both sizes.
    """
    text = str(prefix)
    stem = text.removesuffix(".bin").removesuffix(".idx")
    if stem != text and not Path(text + ".bin").exists():
        raise BadInput(f"{flag}: found {text}; allowed: the prefix without suffix, {stem}")
    bin_path, idx_path = Path(text + ".bin"), Path(text + ".idx")
    for path in (bin_path, idx_path):
        require(path.is_file(), f"{flag}: found no file {path}; tools/data/preprocess.py makes it")
    bin_size = bin_path.stat().st_size
    require(bin_size > 0, f"{flag}: found {bin_path} empty (0 bytes)")
    _check_index(idx_path, bin_path, bin_size, flag)

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(text)


def _check_index(idx_path: Path, bin_path: Path, bin_size: int, flag: str) -> None:
    """Raise `BadInput` unless the index is whole, in order, and describes `bin_size` bytes."""
    idx_size = idx_path.stat().st_size
    with idx_path.open("rb") as stream:
        header = stream.read(HEADER_BYTES)
    magic_ok = len(header) == HEADER_BYTES and header.startswith(MAGIC)
    require(magic_ok, f"{flag}: found {idx_path} ({idx_size} bytes), which is no Megatron index")
    version, code, sequences, ends = struct.unpack("<QBQQ", header[len(MAGIC) :])
    require(
        version == 1 and code in DTYPES,
        f"{flag}: found {idx_path} with version {version} and dtype code {code}; allowed: version "
        f"1 and an integer dtype code {sorted(DTYPES)}",
    )
    expected = HEADER_BYTES + sequences * (4 + 8) + ends * 8
    # A multimodal index has one byte more for each sequence.
    require(
        idx_size in (expected, expected + sequences),
        f"{flag}: found {idx_path} with {idx_size} bytes; its header asks for {expected}",
    )
    require(sequences > 0 and ends > 1, f"{flag}: found no document in {idx_path}")

    # A memory map: the arrays may be larger than the memory.
    raw = np.memmap(idx_path, mode="r")
    lengths = raw[HEADER_BYTES:][: 4 * sequences].view(np.int32)
    offsets = raw[HEADER_BYTES + 4 * sequences :][: 8 * sequences].view(np.int64)
    documents = raw[HEADER_BYTES + 12 * sequences :][: 8 * ends].view(np.int64)
    end_of = offsets + lengths * np.int64(np.dtype(DTYPES[code]).itemsize)
    in_order = offsets[0] == 0 and lengths.min() >= 0 and bool((end_of[:-1] == offsets[1:]).all())
    require(
        in_order,
        f"{flag}: found {idx_path} with byte offsets that do not follow from its lengths; the "
        "writer was broken: run the preprocessing again",
    )
    require(
        documents[0] == 0 and documents[-1] == sequences and bool((np.diff(documents) >= 0).all()),
        f"{flag}: found {idx_path} whose documents end at sequence {documents[-1]} of {sequences}",
    )
    require(
        int(end_of[-1]) == bin_size,
        f"{flag}: found {bin_path} with {bin_size} bytes; {idx_path} describes {end_of[-1]}: one "
        "is cut short, or they are of two datasets",
    )
