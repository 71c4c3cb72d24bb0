"""Attention without an S x S tensor, by the backend that `ops.attention_choice` names.

Softmax over a causal window goes through PyTorch's own kernels here: blocks of queries against
their own and the previous block's keys where there is a window, the causal kernel, which tiles by
itself, where there is none. Memory grows linearly with the length. Shapes as in `ops.weighting`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengen.ops.attention_choice import choose_aloud, request_of
from megatron_lengen.ops.attention_native import native_attention
from megatron_lengen.ops.tiles import tiled_attention
from megatron_lengen.ops.weighting import Weighting, check_shapes, repeat_heads

# Smaller blocks than this waste more on launching than they save in arithmetic.
MIN_BLOCK = 64


def attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Attention with weights by `weighting`, equal to `naive_attention`.

    Args:
        q: [b, hq, sq, d].
        k, v: [b, hkv, sk, d], sk >= sq.

    Returns:
        [b, hq, sq, d], in q's dtype.
    """
    check_shapes(q, k, v)
    backend = choose_aloud(request_of(q, k, weighting))
    if backend == "native":
        return native_attention(q, k, v, weighting)
    if backend == "blocks":
        return causal_attention(q, k, v, weighting.window, weighting.scale)
    if backend == "flex":
        from megatron_lengen.ops.attention_flex import flex_attention

        return flex_attention(q, k, v, weighting)
    if backend == "triton":
        from megatron_lengen.ops.entmax_triton import entmax_attention

        return entmax_attention(q, k, v, weighting)
    if backend == "adasplash":
        return _adasplash(q, k, v, weighting)
    return tiled_attention(q, k, v, weighting)


def _adasplash(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """The package's kernels, whose scale is fixed at 1 / sqrt(d): another goes into the queries."""
    from adasplash import adasplash

    factor = weighting.scale_for(q) * q.shape[-1] ** 0.5
    if factor != 1:
        q = q * factor
    return adasplash(*(x.contiguous() for x in (q, k, v)), alpha=weighting.alpha, is_causal=True)


def window_mask(sq: int, sk: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees: bool [sq, sk], queries aligned to the end of the keys."""
    j = torch.arange(sk, device=device)
    return Weighting(window).visible(j[sk - sq :], j)[0]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention; a window of W means exactly W keys, the query's own included.

    Args:
        q: [b, hq, sq, d].
        k: [b, hkv, sk, d], sk >= sq.
        v: [b, hkv, sk, d].
        window: W, or None for all earlier keys.
        scale: multiplies the scores; 1 / sqrt(d) by default.

    Returns:
        [b, hq, sq, d], in q's dtype.

    Raises:
        ValueError: for heads, lengths or a window that do not fit each other.
    """
    check_shapes(q, k, v)
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys")
    sq, sk = q.shape[2], k.shape[2]
    if window is not None and window >= sk:
        window = None
    if sq == 1:
        first = 0 if window is None else sk - window
        return _attend(q, k[:, :, first:], v[:, :, first:], scale)
    if sq < sk:
        return tiled_attention(q, k, v, Weighting(window, scale))
    if window is None:
        return _attend(q, k, v, scale, causal=True)
    return _windowed(q, k, v, window, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    k, v = repeat_heads(q, k), repeat_heads(q, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Blocks of B >= W queries against their own and the previous block's keys, all at once."""
    b, hq, s, d = q.shape
    block = max(window, MIN_BLOCK)
    blocks = -(-s // block)
    if blocks == 1:
        return _attend(q, k, v, scale, window_mask(s, s, window, q.device))
    # Padding goes behind the last position, where causality hides it.
    pad = blocks * block - s
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))

    def with_previous(x: Tensor) -> Tensor:
        own = x.unflatten(2, (blocks, block))
        pairs = torch.cat((own[:, :, :-1], own[:, :, 1:]), dim=3)
        return pairs.transpose(1, 2).flatten(0, 1)

    # The first block has no predecessor; every other one sees a slice of the same mask.
    head = _attend(
        q[:, :, :block],
        k[:, :, :block],
        v[:, :, :block],
        scale,
        window_mask(block, block, window, q.device),
    )
    rest = q[:, :, block:].unflatten(2, (blocks - 1, block)).transpose(1, 2).flatten(0, 1)
    mask = window_mask(block, 2 * block, window, q.device)
    tail = _attend(rest, with_previous(k), with_previous(v), scale, mask)
    tail = tail.unflatten(0, (b, blocks - 1)).transpose(1, 2).reshape(b, hq, -1, d)
    return torch.cat((head, tail), dim=2)[:, :, :s]
