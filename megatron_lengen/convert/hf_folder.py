"""Tensors of a Hugging Face folder, in and out, one at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.data.hub import check_on_hub
from megatron_lengen.errors import BadInput, missing_package, require

CONFIG = "config.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What a conversion needs of a repository; weights in the older .bin form only if no other is there.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
_HUB_OLD_WEIGHTS = ["pytorch_model*.bin"]


class HFFolder:
    """A local folder with `config.json` and weights, read tensor by tensor.

    Args:
        folder: where they are.
        renames: text to replace in names of tensors, as those who ask know them.

    Raises:
        BadInput: one line naming the file that is missing or damaged, or a renaming that cannot be.
    """

    def __init__(self, folder: str | Path, renames: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        require(self.folder.is_dir(), f"--load: {self.folder} is not a folder")
        require((self.folder / CONFIG).exists(), f"--load: {self.folder} has no {CONFIG}")
        self.raw_config: dict[str, Any] = _read_json(self.folder / CONFIG)
        self._file_of = self._locate()
        self._stored = _renamed(self._file_of, renames or {})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._stored)

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in the stored dtype."""
        name, path = self._place(name)
        if path.suffix == ".bin":
            return _load_bin(path)[name].clone()
        with _open_safetensors(path) as file:
            return file.get_tensor(name)

    def meta(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the stored shape and dtype."""
        name, path = self._place(name)
        if path.suffix == ".bin":
            return _load_bin(path)[name].to("meta")
        with _open_safetensors(path) as file:
            piece = file.get_slice(name)
            # An empty slice carries the dtype without reading the tensor.
            dtype = piece[:0].dtype if piece.get_shape() else file.get_tensor(name).dtype
            return torch.empty(piece.get_shape(), dtype=dtype, device="meta")

    def _place(self, name: str) -> tuple[str, Path]:
        """How the tensor is called in which file."""
        require(name in self._stored, f"{self.folder}: no tensor {name}")
        stored = self._stored[name]
        return stored, self._file_of[stored]

    def _locate(self) -> dict[str, Path]:
        for single, index in zip(_SINGLE, _INDEX, strict=True):
            if (self.folder / index).exists():
                weights = _read_json(self.folder / index).get("weight_map", {})
                files = {self.folder / name for name in weights.values()}
                for path in sorted(files):
                    require(path.exists(), f"{path}: missing, though {index} names it")
                found = {name: path for path in files for name in _names(path)}
                lost = sorted(set(weights) - set(found))
                require(not lost, f"{self.folder}: no tensor {', '.join(lost[:3])}")
                return found
            if (self.folder / single).exists():
                path = self.folder / single
                return dict.fromkeys(_names(path), path)
        raise BadInput(f"--load: {self.folder} has no {_SINGLE[0]}, {_INDEX[0]} or .bin weights")


class ShardWriter:
    """Collects tensors into `model-0000x-of-0000y.safetensors` (one file: `model.safetensors`).

    Call `add` for every tensor, then `close`.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = {"total_parameters": 0, "total_size": 0}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is written when its shard is full."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._flush()
        # A view into a larger tensor would be stored whole.
        self._pending[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._pending_bytes += size
        self._total["total_size"] += size
        self._total["total_parameters"] += tensor.numel()

    def close(self) -> None:
        """Write the rest, name the shards, and write the index when there are several."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else _SINGLE[0]
            os.rename(self._part(number), self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": self._total, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self._folder / _INDEX[0], index)

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending:
            return
        self._shards.append(list(self._pending))
        part = self._part(len(self._shards))
        save_file(self._pending, part, metadata={"format": "pt"})
        # The library makes files for the owner only; the folder shows what the user wants.
        part.chmod(self._folder.stat().st_mode & 0o666)
        self._pending, self._pending_bytes = {}, 0


def fetch_folder(load: str | Path, revision: str | None = None) -> Path:
    """A local folder for `load`: the folder itself, or a snapshot of a hub repository.

    Args:
        load: a folder, or a hub id such as `HuggingFaceTB/SmolLM3-3B-Base`.
        revision: branch, tag or commit of the hub repository.

    Raises:
        BadInput: if there is no such folder or repository.
    """
    folder = Path(load)
    if folder.is_dir():
        require(revision is None, f"--revision: found {revision}; {folder} is a local folder")
        return folder
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(load)) is not None
    require(is_id, f"--load: found {load}; allowed: a folder or a hub id such as ORG/NAME")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_package("huggingface_hub", f"--load {load}") from error
    check_on_hub(str(load), "--load")
    try:
        local = Path(snapshot_download(str(load), revision=revision, allow_patterns=_HUB_FILES))
        if not list(local.glob("*.safetensors")):
            wanted = _HUB_FILES + _HUB_OLD_WEIGHTS
            local = Path(snapshot_download(str(load), revision=revision, allow_patterns=wanted))
    except Exception as error:
        at = f" at {revision}" if revision else ""
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"--load: no folder {load}, and the hub gave none{at}: {reason}") from error
    return local


def parse_size(text: str) -> int:
    """Bytes from `5GB`, `200MB` or a plain number.

    Raises:
        BadInput: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.strip().upper())
    if match is None:
        raise BadInput(f"--max-shard-size: found {text}; allowed: as in 5GB or 200MB")
    factor = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]]
    size = int(float(match[1]) * factor)
    require(size >= 1, f"--max-shard-size: found {text}; allowed: above 0")
    return size


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file the way Hugging Face does: two spaces, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: damaged ({error})") from error
    require(isinstance(value, dict), f"{path}: not a JSON object")
    return value


def _renamed(names: Collection[str], renames: Mapping[str, str]) -> dict[str, str]:
    """Stored names by what they are called after `renames`."""
    stored: dict[str, str] = {}
    for old in renames:
        require(any(old in name for name in names), f"--rename: found {old}; no tensor has it")
    for name in names:
        renamed = name
        for old, new in renames.items():
            renamed = renamed.replace(old, new)
        require(renamed not in stored, f"--rename: {renamed} would be two tensors")
        stored[renamed] = name
    return stored


def _names(path: Path) -> list[str]:
    if path.suffix == ".bin":
        return list(_load_bin(path))
    with _open_safetensors(path) as file:
        return list(file.keys())


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: damaged or cut short ({error})") from error


def _load_bin(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise BadInput(f"{path}: damaged or not a file of weights") from error
