"""Documents out of files: text files, JSON lines (also gzipped), and parquet.

Reading is split in two, so that the costly half can run in other processes: `read_batches` cuts
files into raw pieces in order, `decode_batch` turns a piece into texts and says what was wrong with
the rest, by path and line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lengen.errors import BadInput, missing_package, require

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PACKED_SUFFIXES = (".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z")
# Never text, although nothing forces them to hold a NUL byte early.
DATASET_SUFFIXES = (".bin", ".idx")
BATCH_BYTES = 1 << 20
BATCH_ITEMS = 1000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Batch:
    """Raw consecutive items of one file: `first` is the number of the first line or row, from 1."""

    path: str
    kind: str
    first: int
    items: list[Any]


@dataclass
class Decoded:
    """A batch's texts with their lines, what was skipped by reason, and what was broken and why."""

    texts: list[tuple[int, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def find_files(inputs: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """The files to read, in order, and the binary files in folders that are left out.

    Folders are walked and sorted by path; hidden entries and __pycache__ are passed over. A file
    named by itself is always read.
    """
    files: list[Path] = []
    binary: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_file():
            files.append(path)
            continue
        require(path.is_dir(), f"--input: found no file or folder {path}")
        inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p, path)]
        for found in inside:
            (binary if _is_binary(found) else files).append(found)
        require(len(inside) > 0, f"--input: found no file in the folder {path}")
    return files, binary


def _hidden(path: Path, root: Path) -> bool:
    return any(p.startswith(".") or p == "__pycache__" for p in path.relative_to(root).parts)


def _is_binary(path: Path) -> bool:
    if kind_of(path) != "text" or path.suffix == ".gz":
        return False
    if path.suffix in DATASET_SUFFIXES:
        return True
    with path.open("rb") as stream:
        return b"\0" in stream.read(8192)


def kind_of(path: Path) -> str:
    """`jsonl`, `parquet` or `text`, by the file's suffix."""
    suffix = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    if suffix.lower() in JSON_SUFFIXES:
        return "jsonl"
    return "parquet" if suffix.lower() == ".parquet" else "text"


def read_batches(files: Iterable[Path], text_key: str) -> Iterator[Batch]:
    """Raw batches of all files in order, about `BATCH_BYTES` each.

    Raises:
        BadInput: a compressed file is damaged or cut short, a parquet file has no such column, or a
            packed format is not known. These stop the run whatever --on-error says, since the
            rest of the file would be lost.
    """
    for path in files:
        kind = kind_of(path)
        if path.suffix.lower() in PACKED_SUFFIXES:
            raise BadInput(f"--input: found {path}; allowed: .gz, or unpack it first")
        if kind == "parquet":
            yield from _read_parquet(path, text_key)
        elif kind == "jsonl":
            yield from _grouped(path, kind, _read_lines(path))
        else:
            yield Batch(str(path), kind, 1, [b"".join(_read_lines(path))])


def _grouped(path: Path, kind: str, items: Iterable[Any]) -> Iterator[Batch]:
    batch, size, first = [], 0, 1
    for item in items:
        batch.append(item)
        size += len(item) if item is not None else 0
        if size >= BATCH_BYTES or len(batch) >= BATCH_ITEMS:
            yield Batch(str(path), kind, first, batch)
            first += len(batch)
            batch, size = [], 0
    if batch:
        yield Batch(str(path), kind, first, batch)


def _read_lines(path: Path) -> Iterator[bytes]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    line_number = 0
    try:
        with opened(path, "rb") as stream:
            for line in stream:
                line_number += 1
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(
            f"{path}:{line_number + 1}: the compressed file is damaged or cut short ({error})"
        ) from error


def _read_parquet(path: Path, text_key: str) -> Iterator[Batch]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("pyarrow", "reading .parquet files") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}: no readable parquet file ({error})") from error
    names = table.schema_arrow.names
    require(
        text_key in names,
        f"--text-key: found {text_key}, which is no column of {path}; allowed: {', '.join(names)}",
    )
    rows = (
        value
        for group in table.iter_batches(batch_size=BATCH_ITEMS, columns=[text_key])
        for value in group.column(0).to_pylist()
    )
    yield from _grouped(path, "parquet", rows)


def decode_batch(batch: Batch, text_key: str) -> Decoded:
    """The texts in a batch.

    Blank lines, missing keys, null and blank texts are skipped and counted. Broken items (invalid
    UTF-8 or JSON, a text that is no string, a lone surrogate) are reported as "path:line: why".
    """
    decoded = Decoded()
    for place, item in enumerate(batch.items, start=batch.first):
        try:
            value = _text_of(batch.kind, item, text_key)
        except _BrokenError as error:
            line = place + error.line
            decoded.broken.append(f"{batch.path}:{line}: {error}")
            continue
        if isinstance(value, str):
            decoded.texts.append((place, value))
        else:
            decoded.skipped[value.reason] += 1
    return decoded


def read_texts(inputs: Sequence[str | Path], text_key: str = "text") -> Iterator[str]:
    """The texts of files and folders, in order; `BadInput` at the first broken item."""
    files, _ = find_files(inputs)
    for batch in read_batches(files, text_key):
        decoded = decode_batch(batch, text_key)
        if decoded.broken:
            raise BadInput(decoded.broken[0])
        yield from (text for _, text in decoded.texts)


@dataclass(frozen=True)
class _Skip:
    reason: str


class _BrokenError(Exception):
    """An item that cannot be used; `line` counts from the item's first line."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def _text_of(kind: str, item: Any, text_key: str) -> str | _Skip:
    if kind == "jsonl":
        value = _json_value(item, text_key)
    elif kind == "text":
        value = _decode(item)
        if "\0" in value:
            raise _BrokenError(
                "NUL character: not a text file", value[: value.index("\0")].count("\n")
            )
    else:
        value = item
    if isinstance(value, _Skip):
        return value
    if value is None:
        return _Skip("empty")
    if not isinstance(value, str):
        raise _BrokenError(f"text is a {type(value).__name__}, not a string")
    if not value.strip():
        return _Skip("empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BrokenError(
            f"lone surrogate U+{ord(value[error.start]):04X} at character {error.start + 1} of "
            "the text"
        ) from error
    return value


def _json_value(line: bytes, text_key: str) -> Any:
    text = _decode(line)
    if not text.strip():
        return _Skip("blank line")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise _BrokenError(f"invalid JSON: {reason} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _BrokenError(f"invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise _BrokenError("not a JSON object (one object on each line)")
    return record[text_key] if text_key in record else _Skip("without the key")


def _decode(raw: bytes) -> str:
    """UTF-8 to text, a byte order mark removed."""
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        column = error.start - before.rfind(b"\n")
        raise _BrokenError(
            f"invalid UTF-8 byte 0x{raw[error.start]:02x} at byte {column} of the line",
            before.count(b"\n"),
        ) from error
