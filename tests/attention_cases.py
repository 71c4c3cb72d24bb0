"""Attention's inputs, features and comparisons, for the tests of every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lengen.ops.weighting import WeightDropout, Weighting, naive_attention

RATE, SEED, LAYER, SITE = 0.25, 2**40 + 5, 3, 6
SLOPES = (1.0, 0.5, 0.125, 0.0)
FEATURES = ["", "window scale", "slopes", "documents", "dropout", "window slopes documents dropout"]


class Case(NamedTuple):
    """One attention of two rows: features by name, queries, keys, heads, channels."""

    names: str
    alpha: float
    sq: int
    sk: int
    groups: int
    heads: int = 4
    channels: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        """Relative to the largest value."""
        return {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}[self.dtype]

    def inputs(self, device: str = "cpu") -> list[Tensor]:
        """q, k and v."""
        return inputs(self.sq, self.sk, self.groups, self.dtype, self.heads, self.channels, device)

    def weighting(self, device: str = "cpu") -> Weighting:
        """The weighting, for this many heads."""
        return weighting_of(self.names, self.sk, self.alpha, self.heads, device)


def inputs(
    sq: int,
    sk: int,
    groups: int,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    channels: int = 8,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k and v of two rows, that take gradients."""
    generator = torch.Generator().manual_seed(sq + sk)
    shapes = [(2, heads, sq, channels), (2, groups, sk, channels), (2, groups, sk, channels)]
    return [
        (torch.randn(shape, generator=generator) * 1.5).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def weighting_of(
    names: str, keys: int, alpha: float = 1.0, heads: int = 4, device: str = "cpu"
) -> Weighting:
    """A weighting with the named features."""
    documents = torch.stack([torch.arange(keys) // 9, (torch.arange(keys) > 5).long()])
    dropout = WeightDropout(RATE, SEED, torch.tensor([4, 11], device=device), LAYER, SITE, 2, 5)
    return Weighting(
        window=7 if "window" in names else None,
        scale=0.7 if "scale" in names else None,
        slopes=torch.tensor(SLOPES[:heads], device=device) if "slopes" in names else None,
        documents=documents.to(device) if "documents" in names else None,
        alpha=alpha,
        dropout=dropout if "dropout" in names else None,
    )


def largest_error(qkv: list[Tensor], found: Tensor, expected: Tensor) -> float:
    """Of outputs and gradients, relative to the largest value; NaN is an error like any."""
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.device)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, qkv, grad.to(found.dtype)),
        torch.autograd.grad(expected, qkv, grad.to(expected.dtype), retain_graph=True),
        strict=True,
    )
    errors = []
    for ours, theirs in pairs:
        assert ours.dtype == qkv[0].dtype
        error = (ours.double() - theirs.double()).abs().max() / max(1.0, theirs.abs().max().item())
        errors.append(float("inf") if error.isnan() else error.item())
    return max(errors)


def assert_same(qkv: list[Tensor], found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Outputs and gradients are alike."""
    assert largest_error(qkv, found, expected) <= tolerance


def assert_naive(case: Case, attend, device: str = "cpu") -> None:
    """attend(q, k, v, weighting) is alike the definition."""
    qkv, weighting = case.inputs(device), case.weighting(device)
    expected = naive_attention(*qkv, weighting)
    assert_same(qkv, attend(*qkv, weighting), expected, case.tolerance)
