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

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import native
from megatron_lengen.ops.mask import MaskCoordinates, drop_threshold, keep_mask
from megatron_lengen.ops.variants import row_coefficients

# Partial sums of the gain's gradient; fixed, so that results do not depend on the thread count.
_GAIN_BLOCKS = 32


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


# ---- the definition ------------------------------------------------------------------------------


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Plain RMSNorm of [..., d] over the last dimension, by PyTorch's autograd."""
    unit = x.float()
    unit = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + eps)
    return (gain * unit.to(x.dtype)).to(x.dtype)


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of [..., d] over the last dimension; 0 for a constant row."""
    mean = x.mean(-1)
    # A sum of d equal numbers is not d times the number; its remainder is.
    mean = mean + (x - mean[..., None]).mean(-1)
    return mean, (x - mean[..., None]).square().mean(-1)


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
        x: [s, b, d], fp32 or bf16 (other dtypes take the PyTorch path); strides as they come.
        gain: [d].
        eps: added to the mean square.
        dropout: None (or rate 0) gives the plain norm, bitwise.

    Returns:
        [s, b, d], in x's dtype.

    Raises:
        ValueError: if the dropout's coordinates are not those of s positions and b samples.
    """
    return _NormDropout.apply(x, gain, eps, _active(dropout, x))


def affine_dropout(x: Tensor, dropout: Dropout | None) -> Tensor:
    """z = alpha * b * x + beta of [s, b, d]; x itself for None or rate 0."""
    dropout = _active(dropout, x)
    return x if dropout is None else _NormDropout.apply(x, None, None, dropout)


def _active(dropout: Dropout | None, x: Tensor) -> Dropout | None:
    if dropout is None or not dropout.threshold:
        return None
    where = dropout.coordinates
    rows = (*where.positions.shape, *where.samples.shape)
    if x.dim() != 3 or rows != x.shape[:2]:
        raise ValueError(f"masks for {list(rows)} rows do not fit a tensor of {list(x.shape)}")
    return dropout


class _NormDropout(torch.autograd.Function):
    """Forward and backward over row statistics; eps None means no normalization."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor | None, eps: float | None, dropout: Dropout | None
    ) -> Tensor:
        x = x.contiguous()
        kernels = _kernels_for(x)
        rstd, mean, variance = kernels.statistics(x, gain, eps, dropout is not None)
        alpha = beta = None
        if dropout is not None:
            assert mean is not None and variance is not None
            mean, variance = _over_shards(mean, variance, dropout.group)
            alpha, beta = row_coefficients(dropout.variant, mean, variance, dropout.exact_rate)
        z = kernels.forward(x, gain, rstd, alpha, beta, dropout)
        if dropout is None or (dropout.detach_alpha and dropout.detach_beta):
            mean = variance = None
        ctx.save_for_backward(x, gain, rstd, alpha, mean, variance)
        ctx.dropout, ctx.kernels = dropout, kernels
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, rstd, alpha, mean, variance = ctx.saved_tensors
        dropout, kernels = ctx.dropout, ctx.kernels
        dz = dz.to(x.dtype).contiguous()
        statistics_grads = None
        if mean is not None:
            grads = kernels.coefficient_grads(x, gain, rstd, dz, dropout)
            statistics_grads = _through_coefficients(mean, variance, grads, dropout)
        dx, dgain = kernels.backward(x, gain, rstd, alpha, mean, statistics_grads, dz, dropout)
        return dx, None if gain is None else dgain.to(gain.dtype), None, None


def _over_shards(
    mean: Tensor, variance: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Statistics of the full feature from equal shards: two numbers a token cross the network."""
    ranks = dist.get_world_size(group) if group is not None else 1
    if ranks == 1:
        return mean, variance
    gathered = [torch.empty_like(torch.stack((mean, variance))) for _ in range(ranks)]
    dist.all_gather(gathered, torch.stack((mean, variance)), group=group)
    means, variances = torch.stack(gathered, dim=1)
    full = means.mean(0)
    return full, (variances + (means - full).square()).mean(0)


def _through_coefficients(
    mean: Tensor, variance: Tensor, grads: tuple[Tensor, Tensor], dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """d loss / d (mean, variance) from d loss / d (alpha, beta), by autograd on [s, b] numbers."""
    ranks = dist.get_world_size(dropout.group) if dropout.group is not None else 1
    if ranks > 1:
        both = torch.stack(grads)
        dist.all_reduce(both, group=dropout.group)
        # A shard's kernel divides by its own width; the statistics cover all of them.
        grads = (both[0] / ranks, both[1] / ranks)
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


# ---- arithmetic ----------------------------------------------------------------------------------


def _kernels_for(x: Tensor) -> _TorchKernels:
    """Compiled kernels on the CPU where they exist, PyTorch operations otherwise."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
        library = native.load_library()
        if library is not None:
            return _NativeKernels(library)
    return _TorchKernels()


class _TorchKernels:
    """Forward and backward as PyTorch operations, on any device."""

    def statistics(
        self, x: Tensor, gain: Tensor | None, eps: float | None, moments: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """1 / rms of x, and mean and variance of x_hat: [s, b] each, or None."""
        rstd = None
        if eps is not None:
            rstd = torch.rsqrt(_wide(x).square().mean(-1) + eps)
        if not moments:
            return rstd, None, None
        return rstd, *row_moments(self._hat(x, gain, rstd)[0])

    def forward(self, x, gain, rstd, alpha, beta, dropout: Dropout | None) -> Tensor:
        """z (or x_hat) in x's dtype."""
        hat = self._hat(x, gain, rstd)[0]
        if dropout is not None:
            hat = alpha[..., None] * (self._keep(x, dropout) * hat) + beta[..., None]
        return hat.to(x.dtype)

    def coefficient_grads(self, x, gain, rstd, dz, dropout: Dropout) -> tuple[Tensor, Tensor]:
        """d loss / d alpha and d loss / d beta, [s, b] each."""
        hat = self._hat(x, gain, rstd)[0]
        return (_wide(dz) * self._keep(x, dropout) * hat).sum(-1), _wide(dz).sum(-1)

    def backward(
        self, x, gain, rstd, alpha, mean, statistics_grads, dz, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor | None]:
        """dx in x's dtype and the gain's gradient in fp32."""
        hat, unit = self._hat(x, gain, rstd)
        grad = _wide(dz)
        if dropout is not None:
            grad = alpha[..., None] * (self._keep(x, dropout) * grad)
        if statistics_grads is not None:
            mean_grad, variance_grad = (g[..., None] / x.shape[-1] for g in statistics_grads)
            grad = grad + mean_grad + 2 * variance_grad * (hat - mean[..., None])
        dgain = None if gain is None else (grad * unit).flatten(0, -2).sum(0)
        if rstd is None:
            return grad.to(x.dtype), dgain
        grad = grad * _wide(gain)
        dot = (grad * unit).mean(-1, keepdim=True)
        return (rstd[..., None] * (grad - unit * dot)).to(x.dtype), dgain

    @staticmethod
    def _hat(x: Tensor, gain: Tensor | None, rstd: Tensor | None) -> tuple[Tensor, Tensor]:
        unit = _wide(x)
        if rstd is not None:
            unit = _wide((unit * rstd[..., None]).to(x.dtype))
        return (unit if gain is None else _wide((unit * _wide(gain)).to(x.dtype))), unit

    @staticmethod
    def _keep(x: Tensor, dropout: Dropout) -> Tensor:
        return keep_mask(dropout.coordinates, x.shape[-1], dropout.rate).to(x.device)


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where the input is."""
    return x if x.dtype == torch.float64 else x.float()


class _NativeKernels(_TorchKernels):
    """The same through native.cpp, one row in cache at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def statistics(self, x, gain, eps, moments):
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if eps is not None else None
        mean, variance = (
            x.new_empty(x.shape[:-1], dtype=torch.float32) if moments else None for _ in range(2)
        )
        if rstd is not None or moments:
            self._run(
                "statistics", x, None, gain=gain, eps=eps, rstd=rstd, mean=mean, variance=variance
            )
        return rstd, mean, variance

    def forward(self, x, gain, rstd, alpha, beta, dropout):
        out = torch.empty_like(x)
        self._run("forward", x, dropout, gain=gain, rstd=rstd, alpha=alpha, beta=beta, out=out)
        return out

    def coefficient_grads(self, x, gain, rstd, dz, dropout):
        alpha_grad, beta_grad = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in "ab")
        self._run(
            "coefficient_grads", x, dropout, gain=gain, rstd=rstd, dz=dz,
            alpha_grad=alpha_grad, beta_grad=beta_grad,
        )  # fmt: skip
        return alpha_grad, beta_grad

    def backward(self, x, gain, rstd, alpha, mean, statistics_grads, dz, dropout):
        dx = torch.empty_like(x)
        partial = None
        if gain is not None:
            partial = x.new_empty((_GAIN_BLOCKS, x.shape[-1]), dtype=torch.float32)
        mean_grad, variance_grad = statistics_grads or (None, None)
        self._run(
            "backward", x, dropout, gain=gain, rstd=rstd, alpha=alpha, mean=mean,
            mean_grad=mean_grad, variance_grad=variance_grad, dz=dz, out=dx, gain_grad=partial,
        )  # fmt: skip
        return dx, None if partial is None else partial.sum(0)

    def _run(
        self,
        name: str,
        x: Tensor,
        dropout: Dropout | None,
        gain: Tensor | None = None,
        eps: float | None = None,
        **tensors: Tensor | None,
    ) -> None:
        """Call one kernel; tensors are contiguous and stay alive until it returns."""
        batch = x.shape[1] if x.dim() == 3 else 1
        call = native.Call(
            rows=x.numel() // x.shape[-1] if x.numel() else 0,
            d=x.shape[-1],
            batch=batch,
            blocks=_GAIN_BLOCKS,
            normalize=eps is not None or tensors.get("rstd") is not None,
            threads=torch.get_num_threads(),
            eps=eps or 0.0,
            x=x.data_ptr(),
        )
        alive = [t.contiguous() for t in tensors.values() if t is not None]
        names = [name for name, t in tensors.items() if t is not None]
        if gain is not None:
            names.append("gain")
            alive.append(gain.detach().float().contiguous())
        if dropout is not None:
            where = dropout.coordinates
            names += ["positions", "samples"]
            alive += [where.positions.long().contiguous(), where.samples.long().contiguous()]
            call.key, call.stream = where.seed & (2**64 - 1), where.stream
            call.first_channel, call.threshold = where.first_channel, dropout.threshold
        for field, tensor in zip(names, alive, strict=True):
            setattr(call, field, tensor.data_ptr())
        suffix = "f32" if x.dtype == torch.float32 else "bf16"
        getattr(self._library, f"lengen_{name}_{suffix}")(ctypes.byref(call))
