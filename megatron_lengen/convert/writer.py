"""Write `SAVE/release/`: model weights in Megatron's `torch_dist` format, one process, no GPU.

The files are those of torch.distributed.checkpoint plus Megatron-Core's `metadata.json` and
`common.pt`, which is what `megatron.core.dist_checkpointing.load` reads on any layout. Tensors are
asked for one at a time while the file is written, so that memory holds one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_lengen.checkpoint_folder import (
    DESCRIPTION,
    RELEASE,
    TOKENIZER,
    TRACKER,
    write_description,
    write_tracker,
)
from megatron_lengen.compat import versions
from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.reader import single_process
from megatron_lengen.convert.staging import staged_folder
from megatron_lengen.errors import require


class _OneAtATime(DefaultSavePlanner):
    """Plans with empty tensors and fetches the real ones as they are written."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._fetch = fetch

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._fetch(index.fqn)


def write_tensors(
    folder: Path, metas: Mapping[str, Tensor], fetch: Callable[[str], Tensor]
) -> None:
    """Write the `torch_dist` files of a set of tensors.

    Args:
        folder: an existing, empty folder.
        metas: key -> tensor on the meta device giving shape and dtype.
        fetch: key -> the full tensor on the CPU, of that shape and dtype.

    Raises:
        Whatever `fetch` raises.
    """
    raised: list[Exception] = []

    def checked(key: str) -> Tensor:
        try:
            tensor = fetch(key)
        except Exception as error:
            raised.append(error)
            raise
        if tensor.shape != metas[key].shape or tensor.dtype != metas[key].dtype:
            raise ValueError(f"{key}: {tensor.shape} {tensor.dtype}, planned {metas[key]}")
        return tensor.contiguous()

    try:
        with single_process():
            dcp.save(
                dict(metas),
                storage_writer=FileSystemWriter(folder),
                planner=_OneAtATime(checked),
                no_dist=True,
            )
    except CheckpointException as error:
        # Not an Exception to Python, and it hides what went wrong in text.
        raise (raised[0] if raised else RuntimeError(str(error))) from error
    torch.save({"iteration": 0, "checkpoint_version": 3.0}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1, "torch", 1), str(folder))


def write_release(
    save: str | Path,
    config: LengenConfig,
    metas: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor],
    *,
    write_tokenizer: Callable[[Path], None] | None = None,
    check: Callable[[Path], None] | None = None,
    details: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Publish `SAVE/release/` and point the tracker file at it, last.

    Args:
        save: checkpoint folder; with `force` its `release/` and tracker are replaced.
        config: configuration stored in `lengen.json`.
        metas, fetch: as in `write_tensors`.
        write_tokenizer: fills the (created) `tokenizer/` folder.
        check: called with the written folder before it is published; raises to stop.
        details: further entries of `lengen.json`.

    Returns:
        The release folder.

    Raises:
        BadInput: if the target exists and `force` is off.
    """
    save = Path(save)
    tracker = save / TRACKER
    taken = tracker.exists() and not force
    require(not taken, f"--save: {save} holds a checkpoint already; allowed: a new folder, --force")
    with staged_folder(save / RELEASE, force, marker=DESCRIPTION) as folder:
        write_tensors(folder, metas, fetch)
        if write_tokenizer is not None:
            (folder / TOKENIZER).mkdir()
            write_tokenizer(folder / TOKENIZER)
            if not any((folder / TOKENIZER).iterdir()):
                os.rmdir(folder / TOKENIZER)
        description = {
            "iteration": 0,
            "model": config.architecture(),
            "arguments": {},
            "versions": versions(),
            **(details or {}),
        }
        write_description(folder, description)
        if check is not None:
            check(folder)
    write_tracker(save, RELEASE)
    return save / RELEASE
