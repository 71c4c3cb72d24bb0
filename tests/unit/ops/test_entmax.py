"""Alpha-entmax against the `entmax` package (sorting and bisection, in float64)."""

from __future__ import annotations

import entmax as package
import pytest
import torch
from torch import Tensor

from megatron_lengen.ops.entmax import entmax


def expected(scores: Tensor, alpha: float) -> Tensor:
    if alpha == 1.5:
        return package.entmax15(scores, dim=-1)
    if alpha == 2:
        return package.sparsemax(scores, dim=-1)
    return package.entmax_bisect(scores, alpha, dim=-1, n_iter=100)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.8, 2.0])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("n", [1, 2, 63, 1000])
def test_values_and_gradients(n, spread, alpha):
    generator = torch.Generator().manual_seed(n)
    scores = (torch.randn(20, n, generator=generator) * spread).requires_grad_()
    theirs = scores.detach().double().requires_grad_()
    grad = torch.randn(20, n, generator=generator)
    weights, reference = entmax(scores, alpha), expected(theirs, alpha)
    torch.testing.assert_close(weights.double(), reference, rtol=0, atol=1e-6)
    (found,) = torch.autograd.grad(weights, scores, grad)
    (wanted,) = torch.autograd.grad(reference, theirs, grad.double())
    # Close to the edge of the support the slope p^(2 - alpha) is steep for alpha near 2.
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_zeros_are_exact(alpha):
    """Where the package says 0 by a margin, we say exactly 0; rows sum to 1."""
    scores = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)) * 4
    weights, reference = entmax(scores, alpha), expected(scores.double(), alpha)
    assert (reference == 0).float().mean() > 0.5
    assert torch.equal(weights == 0, reference == 0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(50), rtol=0, atol=1e-6)


def test_against_finite_differences():
    scores = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: entmax(z, 1.4), (scores,))


def test_bf16_scores_far_from_zero():
    """Report 25 of the field: one score of -1000, the others at -1005."""
    scores = torch.full((128,), -1005.0, dtype=torch.bfloat16)
    scores[3] = -1000.0
    scores.requires_grad_()
    weights = entmax(scores)
    assert weights.dtype == torch.bfloat16
    assert weights.tolist() == [1.0 if i == 3 else 0.0 for i in range(128)]
    weights.sum().backward()
    assert torch.isfinite(scores.grad).all()


def test_hidden_scores_get_nothing():
    scores = torch.tensor([[0.3, -torch.inf, 0.1], [-torch.inf, 2.0, -torch.inf]])
    weights = entmax(scores)
    assert weights[0, 1] == 0 and weights[0, 0] > weights[0, 2] > 0
    assert weights[1].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
def test_many_equal_scores(alpha):
    """65,536 keys of one score share the weight; a large scale stays finite."""
    weights = entmax(torch.full((65536,), 1e4), alpha)
    torch.testing.assert_close(weights, torch.full((65536,), 1 / 65536), rtol=1e-5, atol=0)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 2.5])
def test_alpha_outside_its_range(alpha):
    with pytest.raises(ValueError, match="alpha"):
        entmax(torch.zeros(3), alpha)
