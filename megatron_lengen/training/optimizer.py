"""Megatron-Core's optimizer and schedule, set up for this package.

Weight decay touches no norm gain, no bias and no query scaling. Embeddings decay, as in Megatron
and the Hugging Face Trainer; `--no-decay-embeddings` exempts them (as SmolLM3's own pre-training
did) and `--decay-all` decays everything (as torchtitan does).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor, nn

from megatron_lengen.errors import require
from megatron_lengen.runtime.agreement import finite_on_all
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.optimizer_repairs import is_torch_adam, members, repair

_NOT_IN_MEGATRONS_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
_SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_style": "--lr-decay-style",
    "lr_decay_steps": "--lr-decay-iters (default --train-iters)",
    "wsd_decay_steps": "--lr-wsd-decay-iters",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "end_wd": "--weight-decay",
}
SCALING_PARAMETERS = "*.query_scaling.*"
EMBEDDING_TABLES = ("*embedding.word_embeddings.weight", "*output_layer.weight")


def build_optimizer(settings: Settings, chunks: list[nn.Module]) -> MegatronOptimizer:
    """AdamW with the run's weight-decay rule."""
    _use_all_at_once()
    overrides = _weight_decay_overrides(settings)
    optimizer = get_megatron_optimizer(settings.optimizer, chunks, config_overrides=overrides)
    for inner in members(optimizer):
        if is_torch_adam(inner):
            for group in inner.param_groups:
                group["fused"] = True  # one pass over each tensor; the default loops over dozens
        repair(inner)
    return optimizer


def weight_decay_groups(settings: Settings, chunk: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer of PyTorch's kind: what decays, and what does not."""
    exempt = list(_weight_decay_overrides(settings))
    groups: dict[float, list[nn.Parameter]] = {1.0: [], 0.0: []}
    for name, parameter in chunk.named_parameters():
        spared = any(key.matches(parameter, name) for key in exempt)
        groups[0.0 if spared else 1.0].append(parameter)
    return [{"params": p, "wd_mult": multiplier} for multiplier, p in groups.items() if p]


def _weight_decay_overrides(settings: Settings) -> dict[ParamKey, ParamGroupOverride]:
    """Which parameters do not decay, in Megatron-Core's terms."""
    if settings.training.decay_all:
        return {}
    overrides = get_standard_config_overrides(settings.optimizer)
    overrides[ParamKey(name=SCALING_PARAMETERS)] = ParamGroupOverride(wd_mult=0.0)
    if not settings.training.decay_embeddings:
        overrides[ParamKey(name=EMBEDDING_TABLES)] = ParamGroupOverride(wd_mult=0.0)
    return overrides


def build_scheduler(
    settings: Settings, optimizer: MegatronOptimizer | torch.optim.Optimizer
) -> OptimizerParamScheduler:
    """The learning-rate schedule, counted in samples as Megatron does."""
    training, config = settings.training, settings.optimizer
    batch = training.global_batch_size
    assert batch is not None and config.lr is not None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=training.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=round(training.warmup_iters * batch),
        lr_decay_steps=training.decay_iters * batch,
        lr_decay_style=training.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=training.decay_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=training.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=training.override_opt_param_scheduler,
        wsd_decay_steps=(training.lr_wsd_decay_iters or 0) * batch,
        lr_wsd_decay_style=training.lr_wsd_decay_style,
    )


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer) -> float:
    """Clip and update, unless gradients are not finite on some rank; returns their L2 norm.

    Megatron-Core's own `step` updates with whatever the gradients hold.
    """
    optimizer.prepare_grads()
    norm = finite_on_all(float(optimizer.get_grad_norm()))
    if math.isfinite(norm):
        for inner in members(optimizer):
            parameters = inner.get_parameters()
            if parameters and inner.config.clip_grad > 0.0:
                clip_grads.clip_grad_by_total_norm_fp32(parameters, inner.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
    return norm


def _use_all_at_once() -> None:
    """Let Megatron-Core's norm and clipping do all gradients at once, as with Transformer Engine.

    Without it and apex they go tensor by tensor: the norm waits for the device at each, and scaling
    copies each.
    """
    if clip_grads.l2_norm_impl is getattr(clip_grads, "local_multi_tensor_l2_norm", None):
        clip_grads.l2_norm_impl = _norm_at_once
        clip_grads.multi_tensor_scale_impl = _scale_at_once


def _norm_at_once(
    _chunk: int, _overflow: Tensor, lists: list[list[Tensor]], _each: bool
) -> tuple[Tensor, None]:
    """L2 norm [1] of all tensors of a list."""
    (tensors,) = lists
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))[None], None


def _scale_at_once(
    _chunk: int, _overflow: Tensor, lists: list[list[Tensor]], factor: float
) -> None:
    """Scale all tensors of a list in place; the second list is the same."""
    torch._foreach_mul_(lists[1], factor)


def load_scheduler(
    scheduler: OptimizerParamScheduler, state: dict[str, Any], settings: Settings
) -> None:
    """Continue a schedule.

    The optimizer's parameter groups carry rates and Adam's constants of their own, which a
    checkpoint restores; they are set to what the flags ask for, so that an override really
    overrides.

    Args:
        state: what `scheduler_state` gave when the checkpoint was saved.

    Raises:
        BadInput: where flags and checkpoint differ and neither was asked to win.
    """
    training, config = settings.training, settings.optimizer
    if training.use_checkpoint_opt_param_scheduler:
        for name in _NOT_IN_MEGATRONS_STATE:
            setattr(scheduler, name, state[name])
    elif not training.override_opt_param_scheduler:
        free = _of_no_effect(scheduler, state)
        _refuse_differences(scheduler, state, free, training.global_batch_size or 1)
        state = {**state, **{name: getattr(scheduler, name) for name in free}}
    scheduler.load_state_dict(state)
    for group in scheduler.optimizer.param_groups:
        group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
        group["betas"], group["eps"] = (config.adam_beta1, config.adam_beta2), config.adam_eps
    scheduler.step(0)


def scheduler_state(scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    """The whole schedule and the position in it, for a checkpoint."""
    missing = {name: getattr(scheduler, name) for name in _NOT_IN_MEGATRONS_STATE}
    return {**scheduler.state_dict(), **missing}


def _of_no_effect(scheduler: OptimizerParamScheduler, state: dict[str, Any]) -> set[str]:
    """What may differ from the checkpoint's schedule without changing a rate from here on."""
    free = {"wd_incr_steps"}  # weight decay is constant
    if scheduler.lr_decay_style == "constant":
        free.add("lr_decay_steps")
        if state["num_steps"] >= max(scheduler.lr_warmup_steps, state["lr_warmup_steps"]):
            free |= {"lr_warmup_steps", "init_lr"}
    return free


def _refuse_differences(
    scheduler: OptimizerParamScheduler, state: dict[str, Any], free: set[str], batch: int
) -> None:
    differences = []
    for name, flag in _SCHEDULE_FLAGS.items():
        found, stored = getattr(scheduler, name), state[name]
        if found != stored and name not in free:
            if name.endswith("_steps"):  # counted in samples
                found, stored = found / batch, stored / batch
            differences.append(f"{flag} {found} (checkpoint: {stored})")
    require(
        not differences,
        f"the schedule differs from the checkpoint's: {', '.join(differences)}; allowed: the "
        "checkpoint's values (a schedule is kept in samples, so --global-batch-size counts), "
        "--override-opt-param-scheduler or --use-checkpoint-opt-param-scheduler",
    )


def has_state(optimizer: MegatronOptimizer) -> bool:
    """Whether this rank's part of an optimizer has made an update, or loaded one's result."""
    return any(inner.optimizer.state for inner in members(optimizer) if inner.optimizer)
