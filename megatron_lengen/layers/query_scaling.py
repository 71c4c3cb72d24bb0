"""Length-dependent factors of the queries, which keep attention from fading as rows grow.

`learned` (Vasylenko et al. 2026, as the paper's repository writes it), for head h, the attention's
input x and position p, which starts at 0 in every document:

    1 + coef_h(x) * log(p + 2) ^ pow_h(x)
    coef_h(x) = bound * sigmoid(z)   or   bound * softplus(z - shift),    z = s W_coef x + b_coef
    pow_h(x)  = bound * tanh(z),                                          z = s W_pow x + b_pow

`log` (Chiang and Cholak 2022): ln n; `ssmax` (Nakanishi 2025): s_h ln n with a learned s_h, both
with n = p + 1 keys, windows or not. All of it is fp32. The queries are multiplied after their
projection; a factor of a head commutes with rotary positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.coordinates import query_positions
from megatron_lengen.layers.positions import heads_without_positions
from megatron_lengen.ops.constants import constant

# The coefficient of a scaling that starts as the identity.
_FIRST_COEFFICIENT = 5e-4


def scaled_heads(config: LengenConfig, layer: int) -> list[bool]:
    """Which heads of a zero-based layer are scaled, by global number."""
    if config.query_scaling == "none":
        return [False] * config.num_attention_heads
    if config.query_scaling_scope == "all":
        return [True] * config.num_attention_heads
    return heads_without_positions(config, layer)


class QueryScaling(MegatronModule):
    """The factors of one layer's queries; heads are sharded over tensor parallelism."""

    def __init__(self, config: LengenConfig, layer_number: int) -> None:
        super().__init__(config=config)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        heads = config.num_attention_heads // ranks
        first = heads * parallel_state.get_tensor_model_parallel_rank()
        self.scaled = tuple(scaled_heads(config, layer_number - 1)[first : first + heads])
        shapes: dict[str, tuple[int, ...]] = {}
        if config.query_scaling == "learned":
            shapes = dict.fromkeys(("coef_weight", "pow_weight"), (heads, config.hidden_size))
            if config.query_scaling_proj_bias:
                shapes |= dict.fromkeys(("coef_bias", "pow_bias"), (heads,))
        elif config.query_scaling == "ssmax":
            shapes = {"ssmax_scale": (heads,)}
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Factors [s, b or 1, heads of this rank], fp32.

        Args:
            x: [s, b, h], or a part of s under sequence parallelism: the attention's input.
        """
        config = self.config
        sharded = config.sequence_parallel
        length = x.shape[0] * (config.tensor_model_parallel_size if sharded else 1)
        p = query_positions(length).to(x.device, torch.float32)[..., None]
        factor = self._learned(x, p) if config.query_scaling == "learned" else self._of_length(p)
        if all(self.scaled):
            return factor
        return torch.where(constant(self.scaled, torch.bool, x.device), factor, 1.0)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Parameters for a distributed checkpoint, sharded by head."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, dict.fromkeys(state, 0), sharded_offsets
        )

    def _learned(self, x: Tensor, p: Tensor) -> Tensor:
        config = self.config
        if config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        else:
            x = copy_to_tensor_model_parallel_region(x)
        z = self._project(x, self.coef_weight, getattr(self, "coef_bias", None))
        if config.query_scaling_coef_activation == "sigmoid":
            coef = config.query_scaling_coef_bound * torch.sigmoid(z)
        else:
            coef = config.query_scaling_coef_bound * F.softplus(z - config.query_scaling_coef_shift)
        z = self._project(x, self.pow_weight, getattr(self, "pow_bias", None))
        power = config.query_scaling_pow_bound * torch.tanh(z)
        log = torch.log(p + 2) / math.log(config.query_scaling_log_base)
        return 1 + coef * torch.exp(power * torch.log(log))

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        z = self.config.query_scaling_weight_scale * _WideLinear.apply(x, weight)
        return z if bias is None else z + bias.float()

    def _of_length(self, p: Tensor) -> Tensor:
        log = torch.log(p + 1).expand(*p.shape[:2], len(self.scaled))
        return log * self.ssmax_scale.float() if self.config.query_scaling == "ssmax" else log


class ScaledSelfAttention(SelfAttention):
    """Megatron's self-attention with its queries multiplied by `QueryScaling`."""

    def __init__(self, config: LengenConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.query_scaling = QueryScaling(config, self.layer_number)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Query [s, b, heads, d], key and value, as Megatron's, the query scaled."""
        query, *others = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        factor = self.query_scaling(hidden_states)[..., None]
        return (query.float() * factor).to(query.dtype), *others


def initial_value(name: str, config: LengenConfig) -> float | None:
    """What a parameter of `QueryScaling` is filled with; None: drawn like any projection."""
    kind = name.rpartition(".")[2]
    if kind == "ssmax_scale":
        return 1.0
    if kind == "coef_bias" and config.query_scaling_identity_init:
        share = _FIRST_COEFFICIENT / config.query_scaling_coef_bound
        if config.query_scaling_coef_activation == "sigmoid":
            return math.log(share / (1 - share))
        return math.log(math.expm1(share)) + config.query_scaling_coef_shift
    if kind.endswith("bias") or config.query_scaling_identity_init:
        return 0.0
    return None


class _WideLinear(torch.autograd.Function):
    """x W^T in fp32 for inputs of any dtype, without keeping an fp32 copy of x for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_weight = grad.flatten(0, -2).T @ x.flatten(0, -2).float()
        return (grad @ weight.float()).to(x.dtype), of_weight.to(weight.dtype)
