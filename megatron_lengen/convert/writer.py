"""Write `SAVE/release/`: model weights in Megatron's `torch_dist` format, one process, no GPU.

The files are those of torch.distributed.checkpoint plus Megatron-Core's `metadata.json` and
`common.pt`, which is what `megatron.core.dist_checkpointing.load` reads on any layout. Tensors are
asked for while the files are written, so that memory holds few of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor

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
from megatron_lengen.convert.staging import staged_folder
from megatron_lengen.convert.stream import Pace
from megatron_lengen.convert.torch_dist import write_files
from megatron_lengen.errors import require


def write_tensors(
    folder: Path,
    metas: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor],
    pace: Pace | None = None,
) -> None:
    """Write all that `megatron.core.dist_checkpointing.load` reads, for a set of tensors.

    Args, Raises: as `torch_dist.write_files`.
    """
    write_files(folder, metas, fetch, pace)
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
    pace: Pace | None = None,
) -> Path:
    """Publish `SAVE/release/` and point the tracker file at it, last.

    Args:
        save: checkpoint folder; with `force` its `release/` and tracker are replaced.
        config: configuration stored in `lengen.json`.
        metas, fetch, pace: as in `write_tensors`.
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
    needed = sum(meta.nbytes for meta in metas.values())
    with staged_folder(save / RELEASE, force, DESCRIPTION, needed) as folder:
        write_tensors(folder, metas, fetch, pace)
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
