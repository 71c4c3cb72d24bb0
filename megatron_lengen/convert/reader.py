"""Read a checkpoint tensor by tensor, without a model or a process group.

The layout of the folders is in `checkpoint_folder`; the files are Megatron's `torch_dist`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lengen.checkpoint_folder import (
    TOKENIZER,
    locate,
    read_description,
    read_metadata,
)
from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.torch_dist import read_tensor
from megatron_lengen.errors import BadInput

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
        self.meta(key)
        return read_tensor(self.folder, self.metadata, key)


def open_checkpoint(load: str | Path, iteration: int | str | None = None) -> Checkpoint:
    """Open the iteration that `load` names and check that all of its files are whole.

    Raises:
        BadInput: one line naming the file that is missing, cut short or not ours.
    """
    folder = locate(load, iteration)
    return Checkpoint(folder, read_description(folder), read_metadata(folder))
