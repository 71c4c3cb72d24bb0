"""The tensors of `torch_dist` files, straight from and to their places.

A file is a row of archives as `torch.save` makes them, one for each shard of a tensor; `.metadata`
says where each begins and which part of its tensor it is. Reading a tensor puts the shards of any
layout together and compares checksums, as the loader of training does.
"""

from __future__ import annotations

import io
import queue
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import skip_data

from megatron_lengen.convert.stream import Job, Pace, bytes_of, read_into
from megatron_lengen.errors import BadInput, require

_NAME_AND_EXTRA = 26  # where an archive's local header has the lengths of these two


def read_tensor(folder: Path, metadata: Metadata, key: str) -> Tensor:
    """The full tensor `key` on the CPU, in the stored dtype.

    Args:
        folder: an iteration's.
        metadata: of that folder.

    Raises:
        BadInput: naming the file whose bytes cannot be read or have changed.
    """
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
    require(stored == entry.size.numel(), f"{folder}: parts of {key} are missing")
    full = None
    for number, chunk in enumerate(entry.chunks):
        place = metadata.storage_data[MetadataIndex(key, chunk.offsets, number)]
        part = _read_archive(folder / place.relative_path, place.offset, place.length, key)
        if part.shape == entry.size:
            return part.contiguous()
        if full is None:
            full = torch.empty(entry.size, dtype=entry.properties.dtype)
        into = full
        for dimension, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            into = into.narrow(dimension, start, size)
        into.copy_(part)
    assert full is not None
    return full


def write_files(
    folder: Path,
    metas: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor],
    pace: Pace | None = None,
) -> None:
    """Write the files of a set of tensors, one for each worker, and `.metadata` behind them.

    Args:
        folder: an existing, empty folder.
        metas: key -> tensor on the meta device giving shape and dtype.
        fetch: key -> the full tensor on the CPU, of that shape and dtype.
        pace: one thread and no bar by default; with more, `fetch` is called from several.

    Raises:
        Whatever `fetch` raises.
    """
    pace = pace or Pace()
    (plan,), metadata = create_default_global_save_plan(
        [create_default_local_save_plan(dict(metas), is_coordinator=True)]
    )
    results: list[WriteResult] = []
    with ExitStack() as opened:
        files: queue.SimpleQueue[BinaryIO] = queue.SimpleQueue()
        for number in range(pace.workers):
            files.put(opened.enter_context(open(folder / f"__0_{number}.distcp", "wb")))

        def write(item: WriteItem) -> None:
            file = files.get()
            try:
                tensor = _checked(fetch(item.index.fqn), item.index.fqn, metas)
                results.append(_write_archive(file, item, tensor))
            finally:
                files.put(file)

        def job(item: WriteItem) -> Job:
            size = metas[item.index.fqn].nbytes
            # What a tensor is made of, and itself.
            return Job(lambda: write(item), size, 2 * size)

        pace.run([job(item) for item in plan.items], "tensors")
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])


def _checked(tensor: Tensor, key: str, metas: Mapping[str, Tensor]) -> Tensor:
    if tensor.shape != metas[key].shape or tensor.dtype != metas[key].dtype:
        raise ValueError(f"{key}: {tensor.shape} {tensor.dtype}, planned {metas[key]}")
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    # Of a view, all of the memory behind it would be written.
    return tensor if whole and tensor.is_contiguous() else tensor.clone().contiguous()


def _write_archive(file: BinaryIO, item: WriteItem, tensor: Tensor) -> WriteResult:
    start = file.tell()
    out = _Out(file)
    try:
        torch.save(tensor, out)  # type: ignore[arg-type]
    except RuntimeError:
        if out.error is not None:
            raise out.error from None
        raise
    length = file.tell() - start
    return WriteResult(item.index, length, _StorageInfo(Path(file.name).name, start, length))


class _Out(io.RawIOBase):
    """A file to append to that keeps what went wrong, which `torch.save` may hide."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view) if view else 0
        self._at += got
        return got


def _read_archive(path: Path, offset: int, length: int, key: str) -> Tensor:
    """One shard, its bytes compared with their checksum."""
    try:
        with open(path, "rb", buffering=0) as file:
            window: Any = _Window(file, offset, length)
            # Shape, strides and dtype, in memory that is not touched yet.
            with skip_data():
                tensor = torch.load(window, map_location="cpu", weights_only=True)
            window.seek(0)
            with zipfile.ZipFile(window) as archive:
                for record in archive.infolist():
                    if record.filename.endswith("/data/0"):
                        _fill(tensor, window, record)
                    else:
                        archive.read(record)
    except Exception as error:  # what torch raises for damage depends on where it is
        raise BadInput(f"{path}: {key} cannot be read, damaged ({error})") from error
    return tensor


def _fill(tensor: Tensor, window: Any, record: zipfile.ZipInfo) -> None:
    """Put an archive's bytes into the memory of the tensor that it describes."""
    storage = tensor.untyped_storage()
    size = record.file_size
    require(storage.nbytes() == size, f"{size} bytes for a tensor of {storage.nbytes()}")
    if size == 0:
        return
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    # Not as zipfile reads it, by way of copies.
    window.seek(record.header_offset + _NAME_AND_EXTRA)
    name, extra = struct.unpack("<HH", window.read(4))
    read_into(window, window.tell() + name + extra, raw)
    require(zlib.crc32(bytes_of(raw)) == record.CRC, "its checksum differs")
