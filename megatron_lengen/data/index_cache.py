"""The indices of Megatron's datasets on every machine, whichever disks the machines share.

Megatron-Core lets the first rank build the indices and all others read its files, so that machines
with disks of their own find none. Here every machine builds what its cache lacks.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from torch.utils.data import Dataset

from megatron_lengen.errors import BadInput
from megatron_lengen.runtime.agreement import first_problem

logger = logging.getLogger(__name__)


def build_on_every_machine(builder: BlendedMegatronDatasetBuilder) -> list[Dataset | None]:
    """The builder's datasets; called on all ranks.

    The first rank comes first, then the first process of every machine, which finds everything
    where the folder is shared, then all others. Files that a killed run left half written are
    built anew.

    Raises:
        BadInput: on all ranks, where one of them cannot write or read its cache.
    """
    # A blend has no cache of its own without --data-cache-path, which Megatron would say each time.
    logging.getLogger(BlendedDataset.__module__).setLevel(logging.ERROR)
    first_here = int(os.environ.get("LOCAL_RANK", "0")) == 0
    together = dist.is_initialized()
    own_turn = 0 if not together or dist.get_rank() == 0 else 1 if first_here else 2
    built: list[Dataset | None] = []
    for turn in range(3):
        problem = None
        if turn == own_turn:
            try:
                if first_here:
                    _remove_broken(builder.config)
                with _on_its_own():
                    built = builder.build()
            except Exception as error:
                # Megatron-Core wraps some of them.
                cause = error if isinstance(error, OSError) else error.__cause__
                if not isinstance(cause, OSError):
                    raise
                problem = _describe(cause, builder.config)
        problem = first_problem(problem) if together else problem
        if problem:
            raise BadInput(problem)
    return built


@contextmanager
def _on_its_own() -> Iterator[None]:
    """Megatron-Core takes this process for the first rank, and waits for no other."""
    kept = {"get_rank": dist.get_rank, "barrier": dist.barrier}
    alone: dict[str, Any] = {"get_rank": lambda *_, **__: 0, "barrier": lambda *_, **__: None}
    try:
        for name, function in alone.items():
            setattr(dist, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def _remove_broken(config: BlendedMegatronDatasetConfig) -> None:
    """Megatron-Core takes a file that is there for a whole one."""
    for folder in _folders(config):
        for file in folder.glob("*.npy"):
            try:
                np.load(file, mmap_mode="r")
            except (ValueError, EOFError):
                logger.warning("%s is not whole and is built again", file)
                file.unlink()


def _folders(config: BlendedMegatronDatasetConfig) -> list[Path]:
    """Where Megatron-Core keeps the indices: one folder, or one beside each dataset."""
    if config.path_to_cache:
        return [Path(config.path_to_cache)]
    blends = [config.blend, *(config.blend_per_split or [])]
    prefixes = [prefix for blend in blends if blend for prefix in blend[0]]
    return [Path(prefix) / "cache/GPTDataset_indices" for prefix in prefixes]


def _describe(error: OSError, config: BlendedMegatronDatasetConfig) -> str:
    given = config.path_to_cache or "none, so that the index goes beside the data"
    return (
        f"--data-cache-path: found {given}, where {socket.gethostname()} cannot build or read the "
        f"data's index: {error}; allowed: a folder that every machine can write"
    )
