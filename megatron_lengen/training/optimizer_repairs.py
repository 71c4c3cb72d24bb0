"""Repairs of Megatron-Core's optimizers where a run that is resumed needs them.

Its distributed optimizer expects Transformer Engine's or apex's Adam when it loads a checkpoint.
PyTorch's keeps a step counter of its own for every parameter, which needs three repairs: states
that exist before they are asked for, a loader that leaves the counter alone, and counters that are
not one shared tensor (which would count as many steps as there are parameters). Neither it nor the
16-bit optimizer saves a model rightly that has fp32 parameters among 16-bit ones.
"""

from __future__ import annotations

import types
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.optimizer import (
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
)
from torch import Tensor, nn


def repair(optimizer: MegatronOptimizer) -> None:
    """Puts right methods in the place of those that fail, on one optimizer."""
    if isinstance(optimizer, DistributedOptimizer):
        _number_as_held(optimizer)
        if is_torch_adam(optimizer):
            optimizer._set_main_param_and_optimizer_states = types.MethodType(
                _set_states_without_step, optimizer
            )
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        optimizer.sharded_state_dict = types.MethodType(_sharded_state_of_16_bits, optimizer)


def prepare_for_loading(optimizer: MegatronOptimizer) -> None:
    """Make the states that a distributed optimizer's checkpoint is loaded into."""
    for inner in members(optimizer):
        if isinstance(inner, DistributedOptimizer) and is_torch_adam(inner):
            inner._init_optimizer_states_with_dummy_values()


def finish_loading(optimizer: MegatronOptimizer) -> None:
    """Give every parameter a step counter of its own."""
    for inner in members(optimizer):
        if is_torch_adam(inner):
            for state in inner.optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].detach().clone()


def members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that a chained one consists of."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def is_torch_adam(optimizer: MegatronOptimizer) -> bool:
    """Whether the updates are PyTorch's."""
    return isinstance(optimizer.optimizer, torch.optim.Adam)  # AdamW is one too


def _number_as_held(optimizer: DistributedOptimizer) -> None:
    """A group holds its fp32 parameters first, which Megatron-Core's numbering does not know."""
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group, (wide, narrow) in enumerate(groups):
        for order, parameter in enumerate((*wide, *narrow)):
            optimizer.model_param_group_index_map[parameter] = (group, order)


@torch.no_grad()
def _set_states_without_step(
    self: DistributedOptimizer, model_param: nn.Parameter, tensors: dict[str, Tensor]
) -> None:
    """Load master weights and moments of one parameter; the counter comes from the groups."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for key, destination in {"param": main, **self.optimizer.state[main]}.items():
        if key != "step":
            destination.copy_(tensors[key])


def _sharded_state_of_16_bits(
    self: Float16OptimizerWithFloat16Params,
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> ShardedStateDict:
    """Moments of every parameter, and masters of those that have one.

    Megatron-Core's own counts only 16-bit parameters when it looks for a parameter's name, so that
    one fp32 parameter among them shifts all that follow.
    """
    if is_loading:
        self.init_state_fn(self.optimizer, self.config)
    models = {
        id(main): model
        for group, mains in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
        for model, main in zip(group, mains, strict=True)
    }
    held = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
    named = get_param_id_to_sharded_param_map(
        model_sharded_state_dict, (models.get(id(parameter), parameter) for parameter in held)
    )
    numbers = {id(parameter): number for number, parameter in enumerate(held)}
    state = self.state_dict()
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(
                named[numbers[id(main)]], main, prefix="optimizer.state.fp32_param"
            )
            for main in mains
        ]
        for mains in self.fp32_from_float16_groups
    ]
    step = self._extract_common_per_param_step(state["optimizer"])
    optim_state_to_sharding_state(state["optimizer"], named, exclude_keys="step")
    if step:
        state["optimizer"]["state"]["common_step"] = step
    return state
