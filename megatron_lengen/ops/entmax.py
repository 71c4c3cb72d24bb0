"""Alpha-entmax (Peters et al. 2019): softmax with exact zeros, by its threshold.

    p_j = [(alpha - 1) z_j - tau]_+ ^ (1 / (alpha - 1)),    tau such that the p_j sum to 1

With e = 1 / (alpha - 1) and u_j = [(alpha - 1) z_j - tau]_+ the condition is ||u||_e = 1. That norm
is convex and falls with tau, so Newton's steps from below never pass the root; where the u_j are
alike it is a straight line and one step is enough. Nothing is sorted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MAX_STEPS = 50  # five are usual


def check_alpha(alpha: float) -> None:
    """Raise ValueError unless entmax is defined and its threshold unique: 1 < alpha <= 2."""
    if not 1 < alpha <= 2:
        raise ValueError(f"alpha {alpha}; allowed: above 1 and up to 2")


def entmax(scores: Tensor, alpha: float = 1.5) -> Tensor:
    """Alpha-entmax over the last dimension.

    Args:
        scores: [..., n]; -inf gets no weight. At least one score of a row is finite.
        alpha: above 1, where it comes close to softmax, up to 2 (sparsemax).

    Returns:
        [..., n], in the dtype of the scores; computed in fp32 (fp64 for fp64 scores).
    """
    check_alpha(alpha)
    return _Entmax.apply(scores, alpha)


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float) -> Tensor:
        weights = entmax_weights(scores, alpha)
        ctx.save_for_backward(weights)
        ctx.alpha, ctx.dtype = alpha, scores.dtype
        return weights.to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return entmax_score_grads(weights, grad.to(weights.dtype), ctx.alpha).to(ctx.dtype), None


def entmax_weights(scores: Tensor, alpha: float) -> Tensor:
    """Weights [..., n] of scores [..., n], in fp32 or fp64, without autograd."""
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    x = (wide - wide.amax(-1, keepdim=True)).mul_(alpha - 1)
    return weights_above(x, entmax_threshold(x, alpha), alpha)


def weights_above(x: Tensor, threshold: Tensor, alpha: float) -> Tensor:
    """Weights [..., n] from x as in `entmax_threshold` and its result; each row sums to 1."""
    weights = _power((x - threshold).clamp_(min=0), 1 / (alpha - 1))
    return weights.div_(weights.sum(-1, keepdim=True))


def entmax_score_grads(weights: Tensor, weight_grads: Tensor, alpha: float) -> Tensor:
    """Gradient with respect to the scores, [..., n], from that of the weights.

    dz = s (dp - <s, dp> / sum(s)) with s = p^(2 - alpha) on the support and 0 elsewhere.
    """
    slopes = torch.where(weights > 0, weights ** (2 - alpha), 0)
    mean = (slopes * weight_grads).sum(-1, keepdim=True) / slopes.sum(-1, keepdim=True)
    return slopes * (weight_grads - mean)


def entmax_threshold(x: Tensor, alpha: float) -> Tensor:
    """tau [..., 1], in [-1, 0), of x = (alpha - 1) (z - max z) [..., n].

    What lies at -1 or below has no weight, so such x may be left out.
    """
    e = 1 / (alpha - 1)
    tau = torch.full_like(x[..., :1], -1.0)
    tolerance = 4 * torch.finfo(x.dtype).eps
    for _ in range(_MAX_STEPS):
        u = (x - tau).clamp_(min=0)
        fallen = _power(u, e - 1)  # u^(e - 1), and 1 on the support for alpha = 2
        if alpha == 2:
            fallen = (u > 0).to(u.dtype)
        norm = (fallen * u).sum(-1, keepdim=True) ** (1 / e)
        step = (norm - 1) * norm ** (e - 1) / fallen.sum(-1, keepdim=True)
        tau = tau + step
        if not (step > tolerance).any():
            break
    return tau


def _power(u: Tensor, exponent: float) -> Tensor:
    """u ^ exponent for u >= 0, without the general power where a product does."""
    if exponent == 1:
        return u
    return u * u if exponent == 2 else u**exponent
