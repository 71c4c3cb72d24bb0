"""Causal attention with windows, without an S x S tensor.

Shapes: b batch, hq query heads, hkv key/value heads (hq a multiple of hkv), sq queries, sk keys,
d channels of a head, W window in keys. Queries are the last sq positions of the sk keys, so the
same function serves training (sq == sk) and cached decoding (sq < sk).

Memory grows as S * (W + d): windowed attention works on blocks of queries against their own and
the previous block's keys; full attention is PyTorch's causal kernel, which tiles by itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Smaller blocks than this waste more on launching than they save in arithmetic.
MIN_BLOCK = 64
# Queries at a time where a mask against all keys is needed (sq < sk).
QUERY_CHUNK = 256


def window_mask(sq: int, sk: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees: bool [sq, sk], queries aligned to the end of the keys.

    Query i (at position i + sk - sq) sees key j iff j <= i and, with a window, j > i - W.
    """
    i = torch.arange(sk - sq, sk, device=device)[:, None]
    j = torch.arange(sk, device=device)[None, :]
    visible = j <= i
    return visible if window is None else visible & (j > i - window)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The definition, with the S x S matrix written out; the reference for tests.

    Args and result as in `causal_attention`.
    """
    k, v = _repeat_heads(q, k), _repeat_heads(q, v)
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = window_mask(q.shape[2], k.shape[2], window, q.device)
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v


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
    sq, sk = q.shape[2], k.shape[2]
    if sq > sk:
        raise ValueError(f"more queries ({sq}) than keys ({sk})")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys")
    if window is not None and window >= sk:
        window = None
    if sq == 1:
        first = 0 if window is None else sk - window
        return _attend(q, k[:, :, first:], v[:, :, first:], scale)
    if sq < sk:
        return _chunked(q, k, v, window, scale)
    if window is None:
        return _attend(q, k, v, scale, causal=True)
    return _windowed(q, k, v, window, scale)


def _repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Key or value heads repeated to match the query heads."""
    repeats = q.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    k, v = _repeat_heads(q, k), _repeat_heads(q, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def _chunked(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None) -> Tensor:
    """Fewer queries than keys: a few hundred queries at a time against the keys they can see."""
    sq, sk = q.shape[2], k.shape[2]
    outputs = []
    for start in range(0, sq, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, sq)
        last = sk - sq + end
        first = 0 if window is None else max(0, last - (end - start) - window + 1)
        mask = window_mask(end - start, last - first, window, q.device)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        outputs.append(_attend(q[:, :, start:end], keys, values, scale, mask))
    return torch.cat(outputs, dim=2)


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
