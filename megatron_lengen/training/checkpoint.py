"""Saving and resuming: weights, optimizer, schedule and position, through Megatron's torch_dist.

Every layer has keys of its own, so that layers may differ and any layout can load them. A
checkpoint is written under another name and published at the end (see checkpoint_folder).
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lengen import checkpoint_folder
from megatron_lengen.compat import versions
from megatron_lengen.errors import BadInput, is_first_rank, require
from megatron_lengen.training import optimizer as optimizers
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.flags import flag_of

logger = logging.getLogger(__name__)

_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}

# What decides which row comes when: (group of settings, name).
_DATA_ORDER = (
    ("training", "data_path"),
    ("training", "train_data_path"),
    ("training", "split"),
    ("training", "mock_data"),
    ("training", "train_iters"),
    ("training", "global_batch_size"),
    ("model", "seed"),
    ("model", "seq_length"),
)
# What the form of the optimizer's state depends on.
_OPTIMIZER_KIND = (
    ("training", "decay_embeddings"),
    ("training", "decay_all"),
    ("optimizer", "use_distributed_optimizer"),
    ("model", "bf16"),
)


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
    stored = found.description.get("arguments", {})
    with_optimizer = not (
        fresh or settings.training.no_load_optim or stored["training"].get("no_save_optim")
    )
    if not fresh:
        _warn_of_other_data(settings, stored)
    if with_optimizer:
        _refuse_other_optimizer(settings, stored)
        optimizers.prepare_for_loading(optimizer)
        state = _state(settings, chunks, optimizer, scheduler, is_loading=True)
    else:
        state = _model_state(chunks)
    loaded = _read(state, found.folder)
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        _load_weights(unwrap_model(chunk), loaded[name])
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
    state["opt_param_scheduler"] = optimizers.scheduler_state(scheduler)
    return state


def _model_state(chunks: list[nn.Module]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        sharded = unwrap_model(chunk).sharded_state_dict(metadata=dict(_METADATA))
        # Placeholders for quantization state, which only some backends have.
        state[name] = {key: t for key, t in sharded.items() if not key.endswith("_extra_state")}
    return state


def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated")
            return dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(f"--load: {folder} does not fit this model: {reason}") from error


def _load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Strictly, but for the placeholders that `_model_state` leaves out."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    wrong = [key for key in missing if not key.endswith("_extra_state")] + unexpected
    if wrong:
        raise RuntimeError(f"weights missing or unknown after loading: {', '.join(wrong)}")


def _warn_of_other_data(settings: Settings, stored: dict[str, Any]) -> None:
    """One line where the rows to come are not those that the interrupted run would have seen."""
    now = settings.as_json()
    changed = [
        f"{flag_of(name)} {now[group].get(name)} (checkpoint: {stored[group].get(name)})"
        for group, name in _DATA_ORDER
        if now[group].get(name) != stored[group].get(name)
    ]
    if changed and is_first_rank():
        logger.warning(
            "the order of the data differs from the checkpoint's: %s", "; ".join(changed)
        )


def _refuse_other_optimizer(settings: Settings, stored: dict[str, Any]) -> None:
    """The optimizer's state depends on its kind and on the groups of equal weight decay."""
    now = settings.as_json()
    for group, name in _OPTIMIZER_KIND:
        require(
            now[group][name] == stored[group].get(name),
            f"{flag_of(name)}: not as when the checkpoint's optimizer was saved; allowed: the "
            "same as then, or --no-load-optim",
        )


def _chunk_names(chunks: list[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _describe(settings: Settings, folder: Path, progress: Progress) -> None:
    """Write what a reader needs without Megatron: the model, all settings, the tokenizer."""
    description = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "model": settings.model.architecture(),
        "arguments": settings.as_json(),
        "versions": versions(),
    }
    settings.tokenizer.save(folder / checkpoint_folder.TOKENIZER)
    checkpoint_folder.write_description(folder, description)
