"""The norm inside a Mamba2 mixer: RMSNorm(y * silu(z)) of each group of channels.

The gate comes before the norm, as in the released models and in Hugging Face's Mamba2; rounding is
theirs: fp32 up to the gain.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.dropout import DropoutSite
from megatron_lengen.layers.parts import divided
from megatron_lengen.mamba_config import groups_are_shared, inner_size, local_groups
from megatron_lengen.ops.rmsnorm import affine_dropout


class GatedRMSNorm(nn.Module):
    """[s, b, d] and its gate -> [s, b, d], d the channels of this rank.

    One group's statistics cover all tensor-parallel ranks, two numbers a token for each pass.
    `site`, where the dropout variant is applied here (`--include-mixer-norms` or
    `--dropout-apply-to`), masks the output while training.
    """

    def __init__(self, config: LengenConfig) -> None:
        super().__init__()
        channels = inner_size(config) // config.tensor_model_parallel_size
        self.eps = config.layernorm_epsilon
        self.groups = local_groups(config)
        self.shared = groups_are_shared(config)
        self.weight = divided(nn.Parameter(torch.ones(channels, dtype=config.params_dtype)))
        self.site: DropoutSite | None = None

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y and gate z -> normalized, in y's dtype."""
        group = parallel_state.get_tensor_model_parallel_group()
        out = gated_rms_norm(
            y, z, self.weight, self.groups, self.eps, group if self.shared else None
        )
        if self.training and self.site is not None:
            first = parallel_state.get_tensor_model_parallel_rank() * out.shape[-1]
            out = affine_dropout(out, self.site.for_tensor(out, first, group))
        return out


def gated_rms_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    across: dist.ProcessGroup | None = None,
) -> Tensor:
    """weight * u / rms(u) with u = y silu(z).

    Args:
        y, z: [..., d].
        weight: [d].
        groups: parts of d with a mean square of their own.
        eps: added to the mean square.
        across: ranks over which the one group's channels are divided.
    """
    return _GatedNorm.apply(y, z, weight, groups, eps, across)


class _GatedNorm(torch.autograd.Function):
    """Keeps y, z and a number for each row and group; the gated values are computed again."""

    @staticmethod
    def forward(ctx: Any, y, z, weight, groups, eps, across) -> Tensor:
        gated = _wide(y) * F.silu(_wide(z))
        square = gated.unflatten(-1, (groups, -1)).square().mean(-1, keepdim=True)
        rstd = torch.rsqrt(_mean_over(square, across) + eps)
        ctx.save_for_backward(y, z, weight, rstd)
        ctx.groups, ctx.across = groups, across
        return weight * _scaled(gated, rstd).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, rstd = ctx.saved_tensors
        value, gate = _wide(y), _wide(z)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        unit = _scaled(value * silu, rstd)
        grad = _wide(grad)
        weight_grad = (grad * unit.to(y.dtype)).flatten(0, -2).sum(0)
        grad = grad * _wide(weight)
        dot = (grad * unit).unflatten(-1, (ctx.groups, -1)).mean(-1, keepdim=True)
        dot = _mean_over(dot, ctx.across)
        grad = grad - (unit.unflatten(-1, (ctx.groups, -1)) * dot).flatten(-2)
        grad = _scaled(grad, rstd)
        z_grad = grad * value * (sigmoid + silu * (1 - sigmoid))
        return (
            (grad * silu).to(y.dtype), z_grad.to(z.dtype), weight_grad.to(weight.dtype),
            None, None, None,
        )  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _scaled(values: Tensor, by_group: Tensor) -> Tensor:
    """[..., d] times [..., groups, 1]."""
    return (values.unflatten(-1, (by_group.shape[-2], -1)) * by_group).flatten(-2)


def _mean_over(local: Tensor, ranks: dist.ProcessGroup | None) -> Tensor:
    """The mean of a number over ranks of equally many channels."""
    if ranks is None:
        return local
    dist.all_reduce(local, group=ranks)
    return local / dist.get_world_size(ranks)
