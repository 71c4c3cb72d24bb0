"""How scores become weights: windows, documents, ALiBi, entmax, dropout of weights.

    score[i, j] = scale * <q_i, k_j> - slope_h * (i - j)        (ALiBi's bias, a slope a head)
    weight[i]   = softmax or alpha-entmax of the visible scores of query i
    output[i]   = sum_j b[i, j] / (1 - p) * weight[i, j] * v_j  (b ~ Bernoulli(1 - p))

Key j is visible to query i iff j <= i, and j > i - W with a window of W keys, and both lie in the
same document of the row. `naive_attention` is this definition, S x S and all; every backend is
tested against it.

Shapes: b batch, hq query heads, hkv key/value heads (hq a multiple of hkv), sq queries, sk keys,
d channels of a head. Queries are the last sq positions of the sk keys, so that the same functions
serve training (sq == sk), parts of rows and cached decoding (sq < sk).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lengen.ops.entmax import check_alpha, entmax
from megatron_lengen.ops.mask import MaskCoordinates, drop_threshold
from megatron_lengen.ops.rmsnorm import Dropout, affine_dropout


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights; its mask is a function of the coordinates.

    Args:
        rate: probability of dropping; the nearest multiple of 1/65536 is used.
        seed: the run's seed.
        samples: [b] int64, number of each row in training order.
        layer: zero-based global layer.
        site: number of the place in the layer.
        first_head: global number of the first of the query heads at hand.
        first_key: position in the row of the first of the keys at hand.
    """

    rate: float
    seed: int
    samples: Tensor
    layer: int
    site: int
    first_head: int = 0
    first_key: int = 0

    def __post_init__(self) -> None:
        drop_threshold(self.rate)

    def factors(self, heads: range, queries: Tensor, keys: range) -> Tensor:
        """What multiplies the weights: 0 or 1 / (1 - p), [b, heads, queries, keys] fp32.

        Args:
            heads: numbers among the heads at hand.
            queries: [queries] int64, numbers among the keys at hand.
            keys: numbers among the keys at hand.
        """
        ones = torch.ones(len(queries), len(self.samples), len(keys), device=queries.device)
        of_heads = []
        for head in heads:
            coordinates = MaskCoordinates(
                seed=self.seed,
                samples=self.samples,
                positions=self.first_key + queries,
                layer=self.layer,
                site=self.site,
                first_channel=self.first_key + keys.start,
                head=self.first_head + head,
            )
            dropout = Dropout("pre_linear", self.rate, coordinates)
            of_heads.append(affine_dropout(ones, dropout).transpose(0, 1))
        return torch.stack(of_heads, dim=1)


@dataclass(frozen=True)
class Weighting:
    """What a layer's attention does with its scores.

    Args:
        window: W keys, the query's own included; None for all earlier keys.
        scale: multiplies <q, k>; 1 / sqrt(d) by default.
        slopes: [hq] fp32, ALiBi's slope of each head at hand, 0 for none.
        documents: [b, sk] int64, number of each key's document in its row, never falling.
        alpha: 1 for softmax, up to 2 for alpha-entmax.
        dropout: dropout of the weights.

    Raises:
        ValueError: for a window below 1 or an alpha outside [1, 2].
    """

    window: int | None = None
    scale: float | None = None
    slopes: Tensor | None = None
    documents: Tensor | None = None
    alpha: float = 1.0
    dropout: WeightDropout | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} keys")
        if self.alpha != 1:
            check_alpha(self.alpha)

    def of_keys(self, first: int, last: int) -> Weighting:
        """The same for keys first .. last - 1 of those at hand."""
        documents, dropout = self.documents, self.dropout
        if documents is not None:
            documents = documents[:, first:last]
        if dropout is not None:
            dropout = replace(dropout, first_key=dropout.first_key + first)
        return replace(self, documents=documents, dropout=dropout)

    def scale_for(self, q: Tensor) -> float:
        """The factor of <q, k>."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """Which keys queries see: bool [b or 1, queries, keys].

        Args:
            i, j: [queries] and [keys] int64, their numbers among the keys at hand.
        """
        distance = i[:, None] - j[None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.documents is None:
            return seen[None]
        return seen & (self.documents[:, i, None] == self.documents[:, None, j])

    def bias(self, heads: range, i: Tensor, j: Tensor) -> Tensor | None:
        """ALiBi's bias of queries i and keys j: [heads, queries, keys] fp32, or None."""
        if self.slopes is None:
            return None
        slopes = self.slopes[heads.start : heads.stop, None, None]
        return slopes * (j[None, :] - i[:, None])


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError where queries, keys and values do not fit each other."""
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"more queries ({q.shape[2]}) than keys ({k.shape[2]})")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)}")


def repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Key or value heads repeated to match the query heads."""
    repeats = q.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """The definition, with the S x S matrix written out, by PyTorch's autograd.

    Args:
        q: [b, hq, sq, d].
        k: [b, hkv, sk, d], sk >= sq.
        v: [b, hkv, sk, d].

    Returns:
        [b, hq, sq, d], in q's dtype; weights are computed in fp32 (fp64 for fp64 inputs).
    """
    check_shapes(q, k, v)
    j = torch.arange(k.shape[2], device=q.device)
    i = j[k.shape[2] - q.shape[2] :]
    heads = range(q.shape[1])
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = repeat_heads(q, k).to(wide), repeat_heads(q, v).to(wide)
    scores = weighting.scale_for(q) * (q.to(wide) @ k.transpose(-2, -1))
    bias = weighting.bias(heads, i, j)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~weighting.visible(i, j)[:, None], float("-inf"))
    weights = scores.softmax(-1) if weighting.alpha == 1 else entmax(scores, weighting.alpha)
    if weighting.dropout is not None:
        weights = weights * weighting.dropout.factors(heads, i, range(len(j)))
    return (weights @ v).to(q.dtype)
