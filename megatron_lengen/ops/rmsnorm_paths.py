"""What RMSNorm with dropout computes, one step at a time: PyTorch operations, and compiled ones.

`ops.rmsnorm` says what, and puts the steps together; `ops.rmsnorm_triton` has them for GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_lengen.ops import native
from megatron_lengen.ops.mask import keep_mask

if TYPE_CHECKING:
    from megatron_lengen.ops.rmsnorm import Dropout

# Partial sums of the gain's gradient; fixed, so that results do not depend on the thread count.
_GAIN_BLOCKS = 32


class Found(NamedTuple):
    """Forward's results and what backward needs of them."""

    z: Tensor | None
    total: Tensor  # what was normalized: x, or x plus the residual
    rstd: Tensor | None
    alpha: Tensor | None
    mean: Tensor | None
    variance: Tensor | None


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of [..., d] over the last dimension; 0 for a constant row."""
    mean = x.mean(-1)
    # A sum of d equal numbers is not d times the number; its remainder is.
    mean = mean + (x - mean[..., None]).mean(-1)
    return mean, (x - mean[..., None]).square().mean(-1)


class TorchKernels:
    """Forward and backward as PyTorch operations, on any device."""

    def fused(
        self, x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float | None,
        dropout: Dropout | None, keep_moments: bool,
    ) -> Found | None:  # fmt: skip
        """All of forward at once, where these kernels can; mean and variance where wanted."""
        return None

    def statistics(
        self, x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float | None,
        moments: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """x plus the residual, its 1 / rms, and mean and variance of x_hat: [s, b] or None."""
        total, rstd = x if residual is None else x + residual, None
        if eps is not None:
            rstd = torch.rsqrt(_wide(total).square().mean(-1) + eps)
        if not moments:
            return total, rstd, None, None
        return total, rstd, *row_moments(self._hat(total, gain, rstd)[0])

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
        self, x, gain, rstd, alpha, mean, statistics_grads, dz, total_grad, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor | None]:
        """dx in x's dtype, `total_grad` added to it, and the gain's gradient."""
        hat, unit = self._hat(x, gain, rstd)
        grad = _wide(dz)
        if dropout is not None:
            grad = alpha[..., None] * (self._keep(x, dropout) * grad)
        if statistics_grads is not None:
            mean_grad, variance_grad = (g[..., None] / x.shape[-1] for g in statistics_grads)
            grad = grad + mean_grad + 2 * variance_grad * (hat - mean[..., None])
        dgain = None if gain is None else (grad * unit).flatten(0, -2).sum(0)
        if rstd is not None:
            grad = grad * _wide(gain)
            dot = (grad * unit).mean(-1, keepdim=True)
            grad = rstd[..., None] * (grad - unit * dot)
        if total_grad is not None:
            grad = grad + _wide(total_grad)
        return grad.to(x.dtype), dgain

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


class NativeKernels(TorchKernels):
    """The same through native.cpp, one row in cache at a time."""

    def statistics(self, x, residual, gain, eps, moments):
        total = None if residual is None else torch.empty_like(x)
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if eps is not None else None
        mean, variance = (
            x.new_empty(x.shape[:-1], dtype=torch.float32) if moments else None for _ in range(2)
        )
        if rstd is not None or moments:
            self._run(
                "statistics", x, None, gain=gain, eps=eps, rstd=rstd, mean=mean, variance=variance,
                residual=residual, out=total,
            )  # fmt: skip
        return x if total is None else total, rstd, mean, variance

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

    def backward(self, x, gain, rstd, alpha, mean, statistics_grads, dz, total_grad, dropout):
        dx = torch.empty_like(x)
        partial = None
        if gain is not None:
            partial = x.new_empty((_GAIN_BLOCKS, x.shape[-1]), dtype=torch.float32)
        mean_grad, variance_grad = statistics_grads or (None, None)
        self._run(
            "backward", x, dropout, gain=gain, rstd=rstd, alpha=alpha, mean=mean,
            mean_grad=mean_grad, variance_grad=variance_grad, dz=dz, out=dx, gain_grad=partial,
            total_grad=total_grad,
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
        native.run(name, x.dtype, call)
