"""Saving and resuming: weights, optimizer, schedule and position, through Megatron's torch_dist.

Every layer has keys of its own, so that layers may differ and any layout can load them. A
checkpoint is written under another name and published at the end (see checkpoint_folder).
"""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lengen import checkpoint_folder
from megatron_lengen.compat import versions
from megatron_lengen.errors import BadInput, is_first_rank, require
from megatron_lengen.runtime.agreement import first_problem, first_rank_does
from megatron_lengen.training import optimizer as optimizers
from megatron_lengen.training import tensor_writer
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.flags import flag_of
from megatron_lengen.training.guards import rerun_state, restore_reruns
from megatron_lengen.training.optimizer_repairs import finish_loading, prepare_for_loading

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
    ("training", "engine"),
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
    skipped: int = 0


def save(
    settings: Settings,
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler,
    progress: Progress,
    folder: Path,
) -> AsyncRequest:
    """Prepare to save everything that a resumed run needs; called by every rank.

    Args:
        optimizer: None where its state is not Megatron-Core's.
        folder: an empty one that every rank sees.

    Returns:
        What writes the tensors, to be scheduled or executed (see tensor_writer).

    Raises:
        Fault: on every rank, if the disk has no room or a file cannot be written.
    """
    if settings.training.no_save_optim:
        optimizer = None
    # Before its first update an optimizer has nothing to save, and nothing is what it goes on from.
    held = optimizer is not None and optimizers.has_state(optimizer)
    fresh = optimizer is not None and first_problem("state" if held else None) is None
    state = _state(chunks, None if fresh else optimizer, is_loading=False)
    state["opt_param_scheduler"] = optimizers.scheduler_state(scheduler)
    state["progress"] = asdict(progress)
    state["rerun"] = rerun_state(settings.training.rerun_mode)
    request = tensor_writer.prepare(state, folder, dict(_METADATA))
    details = {"fresh_optimizer": True} if fresh else {}
    first_rank_does(partial(_describe, settings, folder, progress, details))
    return request


def save_weights(
    settings: Settings,
    weights: dict[str, Tensor],
    progress: Progress,
    folder: Path,
    details: dict[str, Any],
) -> None:
    """Write a checkpoint of whole tensors and no optimizer; called by every rank.

    Args:
        weights: this rank's share of them, by their keys in checkpoints.
        folder: an empty one that every rank sees.
        details: further entries of lengen.json.

    Raises:
        Fault: on every rank, if the disk has no room or a file cannot be written.
    """
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in weights.items()}
    tensor_writer.prepare({"model": shards}, folder, dict(_METADATA)).execute_sync()
    first_rank_does(partial(_describe, settings, folder, progress, details))


def load(
    settings: Settings,
    chunks: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> Progress:
    """Load `settings.load_from`; a converted model, or --finetune, starts at iteration 0."""
    if settings.load_from is None:
        return Progress()
    with_optimizer = resumes_optimizer(settings)
    if with_optimizer:
        prepare_for_loading(optimizer)
    loaded = read(settings, chunks, optimizer if with_optimizer else None)
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
        finish_loading(optimizer)
    else:
        optimizer.reload_model_params()
    return position(settings, loaded, scheduler)


def resumes_optimizer(settings: Settings) -> bool:
    """Whether the optimizer goes on from `settings.load_from`.

    Raises:
        BadInput: if it should, but its state there is of another form.
    """
    if _starts_anew(settings) or settings.training.no_load_optim:
        return False
    assert settings.load_from is not None
    description = settings.load_from.description
    stored = description["arguments"]
    if stored["training"].get("no_save_optim") or description.get("fresh_optimizer"):
        return False
    _refuse_other_optimizer(settings, stored)
    return True


def read(
    settings: Settings, chunks: list[nn.Module], optimizer: MegatronOptimizer | None = None
) -> dict[str, Any]:
    """Load the weights of `settings.load_from` into the model; returns all that was read.

    Args:
        optimizer: None where its state stays in the file.
    """
    found = settings.load_from
    assert found is not None
    if not _starts_anew(settings):
        _warn_of_other_data(settings, found.description["arguments"])
    loaded = _read(_state(chunks, optimizer, is_loading=True), found.folder)
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        _load_weights(unwrap_model(chunk), loaded[name])
    return loaded


def position(
    settings: Settings, loaded: dict[str, Any], scheduler: OptimizerParamScheduler
) -> Progress:
    """Where to go on: the schedule is put there, once the optimizer has what it loads."""
    if _starts_anew(settings):
        return Progress()
    optimizers.load_scheduler(scheduler, loaded["opt_param_scheduler"], settings)
    # Checkpoints of earlier versions lack what was added since.
    known = {field.name for field in fields(Progress)}
    progress = Progress(**{k: v for k, v in loaded["progress"].items() if k in known})
    restore_reruns(settings.training.rerun_mode, progress.iteration, loaded.get("rerun"))
    return progress


def _starts_anew(settings: Settings) -> bool:
    found = settings.load_from
    return found is None or found.release or settings.training.finetune


def _state(
    chunks: list[nn.Module], optimizer: MegatronOptimizer | None, is_loading: bool
) -> dict[str, Any]:
    state = _model_state(chunks)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=dict(_METADATA)
        )
    return state


def _model_state(chunks: list[nn.Module]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        sharded = unwrap_model(chunk).sharded_state_dict(metadata=dict(_METADATA))
        # Placeholders for quantization state, which only some backends have.
        state[name] = {key: t for key, t in sharded.items() if not key.endswith("_extra_state")}
    return state


def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    damage = checkpoint_folder.find_damage(folder, dist.get_rank(), dist.get_world_size())
    damage = first_problem(damage)
    if damage:
        raise BadInput(f"--load: {damage}; allowed: another iteration, with --ckpt-step")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated")
            return dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, CheckpointException, pickle.UnpicklingError) as error:
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
        default = getattr(type(getattr(settings, group)), name, None)  # of what did not exist then
        require(
            now[group][name] == stored[group].get(name, default),
            f"{flag_of(name)}: not as when the checkpoint's optimizer was saved; allowed: the "
            "same as then, or --no-load-optim",
        )


def _chunk_names(chunks: list[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _describe(
    settings: Settings, folder: Path, progress: Progress, details: dict[str, Any]
) -> None:
    """Write what a reader needs without Megatron: the model, all settings, the tokenizer."""
    description = {
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "model": settings.model.architecture(),
        "arguments": settings.as_json(),
        "command": sys.argv,
        "versions": versions(),
        **details,
    }
    found = settings.load_from
    if found is not None and "source" in found.description:
        # The model that training began with, if it was converted: exports go back to its form.
        description["source"] = found.description["source"]
    settings.tokenizer.save(folder / checkpoint_folder.TOKENIZER)
    checkpoint_folder.write_description(folder, description)
