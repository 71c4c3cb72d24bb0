"""Tensors of a Hugging Face folder, one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lengen.checkpoint_folder import TRACKER
from megatron_lengen.convert.bin_files import bin_entries
from megatron_lengen.convert.safetensors_files import Entry, read_entries, read_entry
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
        kind = "; it is a checkpoint already" if (self.folder / TRACKER).exists() else ""
        require((self.folder / CONFIG).exists(), f"--load: {self.folder} has no {CONFIG}{kind}")
        self.raw_config: dict[str, Any] = _read_json(self.folder / CONFIG)
        self._places = self._locate()
        self._stored = {name: name for name in self._places}
        self.rename(renames or {})

    def rename(self, renames: Mapping[str, str]) -> None:
        """Replace text in names of tensors from here on.

        Raises:
            BadInput: for text that no name has, or two tensors of one name.
        """
        renamed = _renamed(self._stored, renames)
        self._stored = {new: self._stored[old] for new, old in renamed.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._stored)

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in the stored dtype."""
        return read_entry(*self._place(name))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first to last - 1 of a tensor, as `read` gives it whole."""
        path, entry = self._place(name)
        return read_entry(path, entry.rows(first, last))

    def meta(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the stored shape and dtype."""
        return self._place(name)[1].meta()

    def _place(self, name: str) -> tuple[Path, Entry]:
        """In which file the tensor lies, and where."""
        require(name in self._stored, f"{self.folder}: no tensor {name}")
        return self._places[self._stored[name]]

    def _locate(self) -> dict[str, tuple[Path, Entry]]:
        for single, index in zip(_SINGLE, _INDEX, strict=True):
            if (self.folder / index).exists():
                weights = _read_json(self.folder / index).get("weight_map", {})
                files = {name: self.folder / name for name in sorted(set(weights.values()))}
                for path in files.values():
                    require(path.exists(), f"{path}: missing, though {index} names it")
                held = {name: _places(path) for name, path in files.items()}
                # A stale copy in another file is not the model's: the index decides.
                lost = sorted(name for name, file in weights.items() if name not in held[file])
                require(not lost, f"{self.folder}: no tensor {', '.join(lost[:3])}")
                known = {name: held[file][name] for name, file in weights.items()}
                others = {n: place for places in held.values() for n, place in places.items()}
                return {**others, **known}
            if (self.folder / single).exists():
                return _places(self.folder / single)
        raise BadInput(f"--load: {self.folder} has no {_SINGLE[0]}, {_INDEX[0]} or .bin weights")


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


def _places(path: Path) -> dict[str, tuple[Path, Entry]]:
    entries = bin_entries(path) if path.suffix == ".bin" else read_entries(path)
    return {name: (path, entry) for name, entry in entries.items()}
