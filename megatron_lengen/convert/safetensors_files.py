"""Safetensors files: where each tensor lies in one, and writing several tensor by tensor.

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and
place of every tensor) and the tensors' bytes. The header follows from shapes and dtypes, so it is
written first, and memory does not depend on the size of a file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lengen.convert.stream import read_into, write_at
from megatron_lengen.errors import BadInput, require

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Where its bytes begin, counted from the file's first."""
    strides: tuple[int, ...] | None = None
    """Of its elements, where they do not lie in order."""

    def meta(self) -> Tensor:
        """An empty tensor on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def rows(self, first: int, last: int) -> Entry:
        """Rows first to last - 1 of the tensor."""
        row = math.prod(self.shape[1:]) if self.strides is None else self.strides[0]
        offset = self.offset + first * row * self.dtype.itemsize
        return self._replace(shape=(last - first, *self.shape[1:]), offset=offset)


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name; only the header is read.

    Raises:
        BadInput: if the file is damaged or cut short, or has a dtype that torch does not.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass  # the library knows everything that can be wrong with a header or a length
        with open(path, "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: damaged or cut short ({error})") from error
    first = _LENGTH.size + length
    entries = {}
    for name, found in header.items():
        if name != "__metadata__":
            kind = found["dtype"]
            require(kind in _DTYPES, f"{path}: {name} is {kind}; allowed: {', '.join(_DTYPES)}")
            offset = first + found["data_offsets"][0]
            entries[name] = Entry(_DTYPES[kind], tuple(found["shape"]), offset)
    return entries


def read_entry(path: Path, entry: Entry) -> Tensor:
    """A tensor of a file, on the CPU.

    Raises:
        BadInput: if it cannot be read.
    """
    shape = entry.shape
    if entry.strides is not None:
        pairs = zip(entry.shape, entry.strides, strict=True)
        shape = (1 + sum((size - 1) * stride for size, stride in pairs),)
    tensor = torch.empty(shape, dtype=entry.dtype)
    try:
        with open(path, "rb", buffering=0) as file:
            read_into(file, entry.offset, tensor)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    return tensor if entry.strides is None else tensor.as_strided(entry.shape, entry.strides)


class ShardWriter:
    """Writes `model-0000x-of-0000y.safetensors` and their index, or `model.safetensors` alone.

    Call `add` once for every tensor, in any order and from any thread, then `close`.

    Args:
        folder: an existing one.
        metas: every tensor's shape and dtype, in the order in which they go into the files.
        max_shard_bytes: no file has more, unless one tensor does.
    """

    def __init__(self, folder: Path, metas: Mapping[str, Tensor], max_shard_bytes: int) -> None:
        self._folder = folder
        self._metas = metas
        self._shards = _shards(metas, max_shard_bytes)
        count = len(self._shards)
        self._files = [
            f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            for number in range(1, count + 1)
        ]
        self._place: dict[str, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        self._missing = set(metas)
        for file, shard in zip(self._files, self._shards, strict=True):
            self._start(file, shard)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, of the planned shape and dtype."""
        meta = self._metas[name]
        if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
            raise ValueError(f"{name}: {tensor.shape} {tensor.dtype}, planned {meta}")
        write_at(*self._place[name], tensor.contiguous())
        self._missing.remove(name)

    def close(self, complete: bool = True) -> None:
        """Close the files, and write the index when there are several.

        Args:
            complete: False after an error; nothing is checked or added then.
        """
        while self._descriptors:
            os.close(self._descriptors.pop())
        if not complete:
            return
        if self._missing:
            raise ValueError(f"not written: {', '.join(sorted(self._missing)[:5])}")
        if len(self._files) > 1:
            pairs = zip(self._files, self._shards, strict=True)
            weight_map = {name: file for file, shard in pairs for name in shard}
            total = {
                "total_parameters": sum(meta.numel() for meta in self._metas.values()),
                "total_size": sum(meta.nbytes for meta in self._metas.values()),
            }
            index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.close(complete=kind is None)

    def _start(self, file: str, shard: list[str]) -> None:
        """Create a file with its header and note where its tensors go."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Wide elements first keeps every tensor aligned to its own.
        for name in sorted(shard, key=lambda name: -self._metas[name].element_size()):
            meta, start = self._metas[name], end
            end += meta.nbytes
            header[name] = {
                "dtype": _NAMES[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        descriptor = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptors.append(descriptor)
        os.write(descriptor, _LENGTH.pack(len(text)) + text)
        for name in shard:
            place = _LENGTH.size + len(text) + header[name]["data_offsets"][0]
            self._place[name] = descriptor, place


def _shards(metas: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names file by file, each filled in order."""
    shards: list[list[str]] = []
    size = 0
    for name, meta in metas.items():
        if not shards or size + meta.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += meta.nbytes
    return shards
