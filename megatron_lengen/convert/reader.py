"""Read a checkpoint tensor by tensor, without a model or a process group.

A checkpoint folder holds `latest_checkpointed_iteration.txt` (`10` or `release`) and iteration
folders in Megatron's `torch_dist` format, each with our `lengen.json` and `tokenizer/`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lengen.checkpoint_folder import (
    DESCRIPTION,
    FORMAT,
    RELEASE,
    TOKENIZER,
    TRACKER,
    iteration_folder,
)
from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.errors import BadInput, require

# Everything else in a checkpoint (optimizer states, RNG states, counters) is not the model.
MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")


@dataclass(frozen=True)
class Checkpoint:
    """One iteration folder, open for reading."""

    folder: Path
    info: dict[str, Any]
    metadata: Metadata = field(repr=False)

    @property
    def name(self) -> str:
        """How the folder is called: `iter_0000010` or `release`."""
        return self.folder.name

    @property
    def tokenizer_folder(self) -> Path | None:
        """Folder of the tokenizer's files, if the checkpoint has one."""
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None

    def config(self, **settings: Any) -> LengenConfig:
        """The model's configuration, with run settings on top."""
        return config_from_architecture(self.info["model"], **settings)

    @cached_property
    def model_keys(self) -> tuple[str, ...]:
        """Names of the model's tensors."""
        return tuple(
            key
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(MODEL_PREFIXES)
        )

    def meta(self, key: str) -> Tensor:
        """An empty tensor on the meta device with the shape and dtype of `key`.

        Raises:
            BadInput: if the checkpoint has no such tensor.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise BadInput(f"{self.folder}: no tensor {key}")
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(self, key: str) -> Tensor:
        """The full tensor `key` on the CPU, in the stored dtype, whatever layout saved it.

        Raises:
            BadInput: if it is missing or its bytes cannot be read.
        """
        tensor = torch.empty_like(self.meta(key), device="cpu")
        reader = _ReaderWithMetadata(self.folder, self.metadata)
        try:
            with single_process():
                dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:
            files = ", ".join(sorted(self._files_of(key)))
            raise BadInput(f"{self.folder}: {files}: {key} cannot be read, damaged") from error
        return tensor

    def _files_of(self, key: str) -> set[str]:
        storage = self.metadata.storage_data
        return {entry.relative_path for index, entry in storage.items() if index.fqn == key}


class _ReaderWithMetadata(FileSystemReader):
    """A reader that does not load `.metadata` again for every tensor."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@contextmanager
def single_process() -> Iterator[None]:
    """Work of torch.distributed.checkpoint without its warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield


def find_iteration(load: str | Path, iteration: int | str | None = None) -> Path:
    """The iteration folder that `--load` (and `--iteration`) name.

    Args:
        load: a checkpoint folder with a tracker file, or an iteration folder itself.
        iteration: a number or `release`; what the tracker file says if None.

    Raises:
        BadInput: if there is none, saying which iterations there are.
    """
    folder = Path(load)
    require(folder.is_dir(), f"--load: {folder} is not a folder")
    if (folder / ".metadata").exists() or (folder / DESCRIPTION).exists():
        own = folder.resolve()
        named = iteration is None or own == _iteration(own.parent, iteration)
        require(named, f"--iteration: found {iteration}; --load is the iteration {folder.name}")
        return folder
    present = sorted(p.name for p in folder.glob("iter_*") if re.fullmatch(r"iter_\d+", p.name))
    present += [RELEASE] if (folder / RELEASE).is_dir() else []
    there = f"there: {', '.join(present) or 'no iterations'}"
    if iteration is not None:
        chosen = _iteration(folder, iteration)
        require(chosen.is_dir(), f"--iteration: found {iteration}; {folder}: {there}")
        return chosen
    tracker = folder / TRACKER
    require(tracker.exists(), f"--load: {folder} has no {TRACKER}; {there}")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    known = text == RELEASE or text.isdecimal()
    require(known, f"{tracker}: found {text!r}; give --iteration N; {there}")
    chosen = _iteration(folder, text)
    require(chosen.is_dir(), f"{tracker}: names {chosen.name}, which is missing; {there}")
    return chosen


def _iteration(root: Path, iteration: int | str) -> Path:
    return root / RELEASE if iteration == RELEASE else iteration_folder(root, int(iteration))


def open_checkpoint(load: str | Path, iteration: int | str | None = None) -> Checkpoint:
    """Open the iteration that `load` names and check that all of its files are whole.

    Raises:
        BadInput: one line naming the file that is missing, cut short or not ours.
    """
    folder = find_iteration(load, iteration)
    info = read_info(folder)
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise BadInput(f"{folder / '.metadata'}: missing or damaged; not a checkpoint") from error
    _check_files(folder, metadata)
    return Checkpoint(folder, info, metadata)


def read_info(folder: Path) -> dict[str, Any]:
    """The content of `lengen.json` in an iteration folder.

    Raises:
        BadInput: if it is missing, damaged or of another format.
    """
    path = folder / DESCRIPTION
    require(path.exists(), f"{path}: missing; not a checkpoint of megatron_lengen")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: damaged ({error})") from error
    found = info.get("format") if isinstance(info, dict) else None
    require(found == FORMAT, f"{path}: format {found}; allowed: {FORMAT}")
    require(isinstance(info.get("model"), dict), f"{path}: no model settings inside")
    return info


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Compare the size of every shard with what the metadata says is in it."""
    needed: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = folder / name
        require(path.exists(), f"{path}: missing; the checkpoint is incomplete")
        found = path.stat().st_size
        require(found >= size, f"{path}: cut short ({found} of {size} bytes)")
