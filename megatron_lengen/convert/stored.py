"""A model on disk, tensor by tensor: an iteration of a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lengen import checkpoint_folder
from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.families import family_of
from megatron_lengen.convert.family import Family, acting_settings
from megatron_lengen.convert.hf_folder import HFFolder, fetch_folder
from megatron_lengen.convert.mapping import pad_vocabulary
from megatron_lengen.convert.reader import Checkpoint, open_checkpoint
from megatron_lengen.convert.to_hf import VOCABULARY_TABLES
from megatron_lengen.convert.to_megatron import understood_config
from megatron_lengen.convert.tokens import ID_KEYS
from megatron_lengen.errors import BadInput, require

# Entries of a config.json that say nothing about the model.
_IMMATERIAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_REVISIONS = re.compile(r"([\w.-]+/[\w.-]+)@(.+)", re.DOTALL)


class StoredModel(ABC):
    """A model that is read one tensor at a time.

    Args:
        label: how error messages call it: what was given, or its folder.
        name: how other people may read of it: no path of this machine.
        folder: where its files are.
    """

    kind: str

    def __init__(self, label: str, name: str, folder: Path) -> None:
        self.label, self.name, self.folder = label, name, folder

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the model's tensors."""

    @abstractmethod
    def meta(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the stored shape and dtype."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, in the stored dtype.

        Raises:
            BadInput: if its bytes are not what was written.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What makes the model the model it is, by names of its own kind."""


class StoredCheckpoint(StoredModel):
    """One iteration of a run, or a `release`, whatever layout saved it.

    The embedding has the rows of padding that one process has, so that layouts do not differ.
    """

    kind = "checkpoint"

    def __init__(self, checkpoint: Checkpoint) -> None:
        folder = checkpoint.folder
        name = f"{folder.resolve().parent.name}/{folder.resolve().name}"
        super().__init__(str(folder), name, folder)
        self.checkpoint = checkpoint
        self.config = checkpoint.config()

    @property
    def names(self) -> tuple[str, ...]:
        """Megatron's keys."""
        return self.checkpoint.model_keys

    def meta(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the stored shape and dtype."""
        return self._padded(name, self.checkpoint.meta(name))

    def read(self, name: str) -> Tensor:
        """The whole tensor, its bytes compared with the checksums that were written."""
        return self._padded(name, self.checkpoint.read(name))

    def settings(self) -> dict[str, Any]:
        """What a forward pass depends on, in a form in which models that compute the same are
        equal, with the defaults of what did not exist when it was saved."""
        return {"decoder": self.config.decoder, **forward_settings(self.config)}

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        return pad_vocabulary(tensor, self.config) if name in VOCABULARY_TABLES else tensor


class StoredFolder(StoredModel):
    """A Hugging Face folder."""

    kind = "Hugging Face folder"

    def __init__(self, folder: Path, revision: str | None = None) -> None:
        """`revision` is ID@REVISION where the folder is a snapshot from the hub."""
        super().__init__(revision or str(folder), revision or folder.resolve().name, folder)
        self._tensors = HFFolder(folder)

    @property
    def names(self) -> tuple[str, ...]:
        """Names as transformers has them."""
        return self._tensors.names

    def meta(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the stored shape and dtype."""
        return self._tensors.meta(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor; these files carry no checksums."""
        return self._tensors.read(name)

    def settings(self) -> dict[str, Any]:
        """As those of a checkpoint, for a family that is known; else `config.json` without what
        differs between writers of one model."""
        raw = self.raw_config
        try:
            known = {"model_type": self.family.name, **forward_settings(self.config)}
        except BadInput:
            return {k: v for k, v in raw.items() if v is not None and k not in _IMMATERIAL}
        return known | {key: raw[key] for key in ID_KEYS if raw.get(key) is not None}

    @property
    def raw_config(self) -> dict[str, Any]:
        """`config.json` as it is."""
        return self._tensors.raw_config

    @cached_property
    def family(self) -> Family:
        """The family of its architecture.

        Raises:
            BadInput: for one that is not known.
        """
        return family_of(self.raw_config)

    @cached_property
    def config(self) -> LengenConfig:
        """The model as ours.

        Raises:
            BadInput: for settings that ours cannot have.
        """
        understood = understood_config(self.folder, self.family, self.raw_config)
        return config_from_architecture(self.family.architecture(understood))


def forward_settings(config: LengenConfig) -> dict[str, Any]:
    """Settings that a forward pass depends on; how weights were drawn is none of them."""
    settings = acting_settings(config)
    return {name: value for name, value in settings.items() if name != "init_method_std"}


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a checkpoint of ours (a run's or one iteration), not Hugging Face's."""
    path = Path(path)
    marks = (checkpoint_folder.TRACKER, checkpoint_folder.DESCRIPTION, ".metadata")
    return any((path / mark).exists() for mark in marks) or bool(checkpoint_folder.iterations(path))


def open_model(load: str | Path, iteration: int | str | None = None) -> StoredModel:
    """The model that `load` names; a revision of a hub repository is downloaded.

    Args:
        load: a checkpoint, one of its iterations, a Hugging Face folder, a hub id or ID@REVISION.
        iteration: which one of a checkpoint; the newest if None.

    Raises:
        BadInput: if there is none, or more than one.
    """
    if is_checkpoint(load):
        return StoredCheckpoint(open_checkpoint(load, iteration))
    require(iteration is None, f"--iteration: found {iteration}; {load} is not a checkpoint")
    name, *revisions = revisions_of(load)
    require(len(revisions) < 2, f"--load: found {load}; allowed: one revision")
    revision = revisions[0] if revisions else None
    if not (Path(load).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", name)):
        raise BadInput(
            f"--load: found {load}; allowed: a checkpoint, a Hugging Face folder, a hub id or "
            "ID@REVISION"
        )
    return StoredFolder(fetch_folder(name, revision), None if Path(load).is_dir() else str(load))


def revisions_of(load: str | Path) -> list[str]:
    """`ID@R1,R2` (or spaces) as the id and its revisions; anything else alone."""
    match = _REVISIONS.fullmatch(str(load))
    if match is None or Path(load).is_dir():
        return [str(load)]
    return [match[1], *(part for part in re.split(r"[,\s]+", match[2]) if part)]
