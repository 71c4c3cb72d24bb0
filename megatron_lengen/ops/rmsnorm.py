"""RMSNorm with the dropout family behind it, in one step.

    x_hat = gain * x / sqrt(mean(x^2) + eps)        (Eq. 5, with eps inside the root)
    z     = alpha * b * x_hat + beta                (Sec. 4.3 and Eq. 12)

`norm_dropout` is the definition in a few lines of PyTorch; `rms_norm_dropout` is what models use:
the same values, saving for backward only its input and a few numbers a row. The mask is computed
again from its coordinates wherever it is needed. `affine_dropout` is the same without the
normalization, for the inputs of single projections and for sublayer outputs.

Rounding: statistics are fp32; x / rms is rounded to the input's dtype before the gain multiplies,
as in Hugging Face's RMSNorm, so that evaluation agrees with it.

Shapes: s positions, b rows of the batch, d features; [s, b, d] throughout.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import native
from megatron_lengen.ops.mask import MaskCoordinates, drop_threshold, keep_mask
from megatron_lengen.ops.rmsnorm_paths import Found, NativeKernels, TorchKernels, row_moments
from megatron_lengen.ops.variants import row_coefficients


@dataclass(frozen=True)
class Dropout:
    """One application of the family: which variant, how strong, where.

    Args:
        variant: a registered name.
        rate: probability of dropping, 0 < p < 1; the nearest multiple of 1/65536 is used.
        coordinates: where the tensor lies in the run.
        detach_alpha, detach_beta: treat the coefficients as constants in backward.
        group: process group over whose ranks the features are sharded, if they are; the row
            statistics then cover all of them.
    """

    variant: str
    rate: float
    coordinates: MaskCoordinates
    detach_alpha: bool = True
    detach_beta: bool = True
    group: dist.ProcessGroup | None = None

    @property
    def threshold(self) -> int:
        """Number of the 65536 mask values that drop."""
        return drop_threshold(self.rate)

    @property
    def exact_rate(self) -> float:
        """The probability that the mask really has."""
        return self.threshold / 65536

    @property
    def ranks(self) -> int:
        """How many ranks share the features."""
        return dist.get_world_size(self.group) if self.group is not None else 1


# ---- the definition ------------------------------------------------------------------------------


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Plain RMSNorm of [..., d] over the last dimension, by PyTorch's autograd."""
    unit = x.float()
    unit = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + eps)
    return (gain * unit.to(x.dtype)).to(x.dtype)


def dropout_definition(x_hat: Tensor, dropout: Dropout) -> Tensor:
    """z = alpha * b * x_hat + beta of [s, b, d], by PyTorch's autograd (features not sharded)."""
    values = x_hat.float()
    alpha, beta = row_coefficients(dropout.variant, *row_moments(values), dropout.exact_rate)
    alpha = alpha.detach() if dropout.detach_alpha else alpha
    beta = beta.detach() if dropout.detach_beta else beta
    keep = keep_mask(dropout.coordinates, x_hat.shape[-1], dropout.rate)
    z = alpha[..., None] * keep * values + beta[..., None]
    return z.to(x_hat.dtype)


def norm_dropout(x: Tensor, gain: Tensor, eps: float, dropout: Dropout | None) -> Tensor:
    """The definition of `rms_norm_dropout`; the reference for tests."""
    x_hat = rms_norm(x, gain, eps)
    return x_hat if dropout is None else dropout_definition(x_hat, dropout)


# ---- what models use -----------------------------------------------------------------------------


def rms_norm_dropout(x: Tensor, gain: Tensor, eps: float, dropout: Dropout | None = None) -> Tensor:
    """RMSNorm and, if given, dropout behind it.

    Args:
        x: [s, b, d]; strides as they come. Kernels take fp32 and bf16, on GPUs fp16 too; other
            dtypes take the PyTorch path.
        gain: [d], of any dtype.
        eps: added to the mean square.
        dropout: None (or rate 0) gives the plain norm, bitwise.

    Returns:
        [s, b, d], in x's dtype.

    Raises:
        ValueError: if the dropout's coordinates are not those of s positions and b samples.
    """
    return _NormDropout.apply(x, None, gain, eps, _active(dropout, x))


def add_rms_norm_dropout(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """The residual addition, RMSNorm of the sum, and dropout behind it if given.

    Args:
        x, residual: [s, b, d], of one dtype.
        gain, eps, dropout: as in `rms_norm_dropout`.

    Returns:
        z [s, b, d] and the new residual [s, b, d], residual + x, from whose rounded values z is
        computed; their gradients are those of the two steps.

    Raises:
        ValueError: if shapes, dtypes or devices of x and residual differ, or as in
            `rms_norm_dropout`.
    """
    alike = [(list(t.shape), t.dtype, t.device) for t in (x, residual)]
    if alike[0] != alike[1]:
        found = " and ".join(f"{shape} {dtype} on {device}" for shape, dtype, device in alike)
        raise ValueError(f"x and residual must be alike, found {found}")
    return _NormDropout.apply(x, residual, gain, eps, _active(dropout, x))


def affine_dropout(x: Tensor, dropout: Dropout | None) -> Tensor:
    """z = alpha * b * x + beta of [s, b, d]; x itself for None or rate 0."""
    dropout = _active(dropout, x)
    return x if dropout is None else _NormDropout.apply(x, None, None, None, dropout)


def _active(dropout: Dropout | None, x: Tensor) -> Dropout | None:
    if dropout is None or not dropout.threshold:
        return None
    where = dropout.coordinates
    rows = (*where.positions.shape, *where.samples.shape)
    if x.dim() != 3 or rows != x.shape[:2]:
        raise ValueError(f"masks for {list(rows)} rows do not fit a tensor of {list(x.shape)}")
    return dropout


class _NormDropout(torch.autograd.Function):
    """Forward and backward over row statistics; eps None means no normalization.

    With a residual it returns z and the sum, without one z.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float | None,
        dropout: Dropout | None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        x = x.contiguous()
        gain = None if gain is None else gain.contiguous()
        residual = None if residual is None else residual.contiguous()
        kernels = _kernels_for(x)
        z, total, *numbers = _forward(kernels, x, residual, gain, eps, dropout)
        assert z is not None
        ctx.save_for_backward(total, gain, *numbers)
        ctx.dropout, ctx.kernels, ctx.adds = dropout, kernels, residual is not None
        ctx.set_materialize_grads(False)
        return (z, total) if ctx.adds else z

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dz: Tensor | None, total_grad: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        x, gain, rstd, alpha, mean, variance = ctx.saved_tensors
        dropout, kernels = ctx.dropout, ctx.kernels
        if dz is None:
            return total_grad, total_grad, None, None, None
        dz = dz.to(x.dtype).contiguous()
        total_grad = None if total_grad is None else total_grad.to(x.dtype).contiguous()
        statistics_grads = None
        if mean is not None:
            grads = kernels.coefficient_grads(x, gain, rstd, dz, dropout)
            statistics_grads = _through_coefficients(mean, variance, grads, dropout)
        dx, dgain = kernels.backward(
            x, gain, rstd, alpha, mean, statistics_grads, dz, total_grad, dropout
        )
        dgain = None if gain is None else dgain.to(gain.dtype)
        return dx, dx if ctx.adds else None, dgain, None, None


def _forward(
    kernels: TorchKernels, x: Tensor, residual: Tensor | None, gain: Tensor | None,
    eps: float | None, dropout: Dropout | None,
) -> Found:  # fmt: skip
    """Forward in one step where the kernels can, and otherwise by way of the statistics."""
    # Backward needs mean and variance only where the coefficients pass gradients.
    keep = dropout is not None and not (dropout.detach_alpha and dropout.detach_beta)
    found = kernels.fused(x, residual, gain, eps, dropout, keep)
    if found is not None:
        return found
    total, rstd, mean, variance = kernels.statistics(x, residual, gain, eps, dropout is not None)
    alpha = beta = None
    if dropout is not None:
        assert mean is not None and variance is not None
        mean, variance = _over_shards(mean, variance, dropout)
        alpha, beta = row_coefficients(dropout.variant, mean, variance, dropout.exact_rate)
    z = kernels.forward(total, gain, rstd, alpha, beta, dropout)
    return Found(z, total, rstd, alpha, mean if keep else None, variance if keep else None)


def _over_shards(mean: Tensor, variance: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """Statistics of the full feature from equal shards: two numbers a token cross the network."""
    if dropout.ranks == 1:
        return mean, variance
    gathered = [torch.empty_like(torch.stack((mean, variance))) for _ in range(dropout.ranks)]
    dist.all_gather(gathered, torch.stack((mean, variance)), group=dropout.group)
    means, variances = torch.stack(gathered, dim=1)
    full = means.mean(0)
    return full, (variances + (means - full).square()).mean(0)


def _through_coefficients(
    mean: Tensor, variance: Tensor, grads: tuple[Tensor, Tensor], dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """d loss / d (mean, variance) from d loss / d (alpha, beta), by autograd on [s, b] numbers."""
    if dropout.ranks > 1:
        both = torch.stack(grads)
        dist.all_reduce(both, group=dropout.group)
        # A shard's kernel divides by its own width; the statistics cover all of them.
        grads = (both[0] / dropout.ranks, both[1] / dropout.ranks)
    with torch.enable_grad():
        mean, variance = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        alpha, beta = row_coefficients(dropout.variant, mean, variance, dropout.exact_rate)
        total = torch.zeros((), device=mean.device)
        if not dropout.detach_alpha:
            total = total + (alpha * grads[0]).sum()
        if not dropout.detach_beta:
            total = total + (beta * grads[1]).sum()
        if not total.requires_grad:
            return torch.zeros_like(mean), torch.zeros_like(variance)
        found = torch.autograd.grad(total, (mean, variance), allow_unused=True)
    return tuple(torch.zeros_like(mean) if g is None else g for g in found)  # type: ignore[return-value]


# ---- which kernels -------------------------------------------------------------------------------


def _kernels_for(x: Tensor) -> TorchKernels:
    """Compiled kernels where they exist, PyTorch operations otherwise."""
    if native.has_kernels(x):
        return NativeKernels()
    if x.device.type == "cuda" and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        triton_kernels = _triton_kernels()
        if triton_kernels is not None:
            return triton_kernels
    return TorchKernels()


@functools.cache
def _triton_kernels() -> TorchKernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from megatron_lengen.ops.rmsnorm_triton import TritonKernels

    return TritonKernels()
