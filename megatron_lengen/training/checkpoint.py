"""Saving and resuming: weights, optimizer, schedule and position, through Megatron's torch_dist.

Every layer has keys of its own, so that layers may differ and any layout can load them. A
checkpoint is written under another name and published at the end (see checkpoint_folder).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_lengen import checkpoint_folder
from megatron_lengen.compat import versions
from megatron_lengen.errors import is_first_rank
from megatron_lengen.training import optimizer as optimizers
from megatron_lengen.training.arguments import Settings

logger = logging.getLogger(__name__)

_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass
class Progress:
    """How far a run is."""

    iteration: int = 0
    consumed_samples: int = 0


def save(
    settings: Settings,
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    progress: Progress,
) -> Path:
    """Save everything that a resumed run needs; returns the iteration's folder."""
    root = settings.training.save
    assert root is not None
    partial = checkpoint_folder.partial_folder(root, progress.iteration)
    if is_first_rank():
        checkpoint_folder.start_partial(root, progress.iteration)
    dist.barrier()
    state = _state(settings, chunks, optimizer, scheduler, is_loading=False)
    state["progress"] = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
    }
    dist_checkpointing.save(state, str(partial), content_metadata=dict(_METADATA))
    if is_first_rank():
        _describe(settings, partial, progress)
        checkpoint_folder.publish(root, progress.iteration)
    dist.barrier()
    return checkpoint_folder.iteration_folder(root, progress.iteration)


def load(
    settings: Settings,
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> Progress:
    """Load `settings.load_from`; a converted model, or --finetune, starts at iteration 0."""
    found = settings.load_from
    if found is None:
        return Progress()
    fresh = found.release or settings.training.finetune
    with_optimizer = not (
        fresh
        or settings.training.no_load_optim
        or found.description["arguments"]["training"].get("no_save_optim")
    )
    if with_optimizer:
        optimizers.prepare_for_loading(optimizer)
        state = _state(settings, chunks, optimizer, scheduler, is_loading=True)
    else:
        state = _model_state(chunks)
    loaded = dist_checkpointing.load(state, found.folder)
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        unwrap_model(chunk).load_state_dict(loaded[name], strict=True)
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
        optimizers.finish_loading(optimizer)
    else:
        optimizer.reload_model_params()
    if fresh:
        return Progress()
    optimizers.load_scheduler(scheduler, loaded["opt_param_scheduler"], settings)
    return Progress(**loaded["progress"])


def _state(
    settings: Settings,
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    is_loading: bool,
) -> dict[str, Any]:
    state = _model_state(chunks)
    if is_loading or not settings.training.no_save_optim:
        state["optimizer"] = optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=dict(_METADATA)
        )
    state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def _model_state(chunks: list[nn.Module]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        sharded = unwrap_model(chunk).sharded_state_dict(metadata=dict(_METADATA))
        # Placeholders for quantization state, which only some backends have.
        state[name] = {key: t for key, t in sharded.items() if not key.endswith("_extra_state")}
    return state


def _chunk_names(chunks: list[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _describe(settings: Settings, folder: Path, progress: Progress) -> None:
    """Write what a reader needs without Megatron: the model, all settings, the tokenizer."""
    description = {
        "format": checkpoint_folder.FORMAT,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "model": settings.model.architecture(),
        "arguments": settings.as_json(),
        "versions": versions(),
    }
    settings.tokenizer.save(folder / checkpoint_folder.TOKENIZER)
    text = json.dumps(description, indent=2, sort_keys=True)
    (folder / checkpoint_folder.DESCRIPTION).write_text(text + "\n")
