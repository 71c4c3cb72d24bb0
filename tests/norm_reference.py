"""RMSNorm with dropout in float64, by autograd over the paper's formulas."""

from __future__ import annotations

import functools
from itertools import product

import pure_philox
import pytest
import torch
from torch import Tensor

from megatron_lengen.ops.mask import MaskCoordinates
from megatron_lengen.ops.rmsnorm import Dropout

EPS = 1e-5
RATE = 0.3
EXACT = round(RATE * 65536) / 65536
SEED, LAYER, SITE = 77, 5, 1
DETACH = list(product([True, False], [True, False]))
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def dropout_at(variant: str, s: int, b: int, alpha: bool = True, beta: bool = True) -> Dropout:
    where = MaskCoordinates(SEED, torch.arange(9, 9 + b), torch.arange(4, 4 + s), LAYER, SITE)
    return Dropout(variant, RATE, where, detach_alpha=alpha, detach_beta=beta)


@functools.cache
def mask_at(s: int, b: int, d: int) -> Tensor:
    samples, positions = list(range(9, 9 + b)), list(range(4, 4 + s))
    return pure_philox.keep(SEED, samples, positions, LAYER, SITE, range(d), RATE)


def formula(variant: str, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and beta as the paper writes them (variance above 0)."""
    if variant == "vpad":
        alpha = variance.sqrt() / ((1 - EXACT) * (variance + EXACT * mean**2)).sqrt()
        return alpha, mean * (1 - alpha * (1 - EXACT))
    if variant == "uneven":
        return 1 / (1 + variance) + EXACT * mean, mean * variance + 0.2
    return torch.ones_like(mean) / (1 - EXACT), torch.zeros_like(mean)


def reference(
    x: Tensor,
    gain: Tensor | None,
    dz: Tensor,
    variant: str | None,
    alpha_fixed: bool,
    beta_fixed: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """z, dx and dgain in float64, by autograd over the formulas; no dropout for no variant."""
    x = x.detach().double().requires_grad_()
    hat, leaves = x, [x]
    if gain is not None:
        gain = gain.detach().double().requires_grad_()
        leaves.append(gain)
        hat = gain * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()
    mean = hat.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((hat - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    z = hat
    if variant is not None:
        alpha, beta = formula(variant, mean, variance)
        alpha = alpha.detach() if alpha_fixed else alpha
        beta = beta.detach() if beta_fixed else beta
        mask = mask_at(*x.shape) if mask is None else mask
        z = alpha * mask.to(x.device) * hat + beta
    return z.detach(), *torch.autograd.grad(z, leaves, dz.double())


def tensors(s: int, b: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(s * b * d)
    # Means that are not 0, so that every term of vpad's derivatives counts.
    x = torch.randn(s, b, d, generator=generator) * 2 + 0.7
    gain = torch.rand(d, generator=generator) + 0.5
    dz = torch.randn(s, b, d, generator=generator) + 0.1
    return x.to(dtype).requires_grad_(), gain.to(dtype).requires_grad_(), dz.to(dtype)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal up to a few roundings of `dtype`, relative to the largest value."""
    tolerance = {torch.float64: 1e-12, torch.float32: 5e-6}.get(dtype, 2e-2)
    error = (found.double() - expected).abs().max().item()
    assert error <= tolerance * max(expected.abs().max().item(), 1e-6)
