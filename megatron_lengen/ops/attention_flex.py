"""FlexAttention: softmax over windows, documents and ALiBi's bias in one compiled CUDA kernel.

PyTorch's own helper finds the blocks of keys that a block of queries reaches by writing out the
whole mask. Here they follow from the ends of the blocks: the nearest and the farthest pair say
whether a window or causality cuts a block, the documents at its ends whether a boundary does.
Shapes as in `ops.weighting`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.ops.constants import constant
from megatron_lengen.ops.weighting import Weighting, check_shapes

BLOCK = 128
# A compiled form serves one number of dimensions and features; lengths become symbols.
_MOST_COMPILED_FORMS = 64


@torch.compiler.disable  # what is compiled here is compiled once, not in every compiled layer
def flex_attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Softmax attention without dropout of weights, equal to `naive_attention`.

    Args:
        q: [b, hq, sq, d], fp32, bf16 or fp16; d from 16.
        k, v: [b, hkv, sk, d], sk >= sq.

    Returns:
        [b, hq, sq, d], in q's dtype.

    Raises:
        ValueError: for entmax or dropout of weights.
    """
    check_shapes(q, k, v)
    if weighting.alpha != 1 or weighting.dropout is not None:
        raise ValueError("FlexAttention serves softmax without dropout of weights")
    sq, sk = q.shape[2], k.shape[2]
    places = _Places(sq, sk, weighting.window, q.device, _Kept.of(weighting.documents))
    with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED_FORMS):
        return _kernel()(
            q,
            k,
            v,
            score_mod=_bias(weighting.slopes, sk - sq),
            block_mask=_block_mask(places),
            scale=weighting.scale_for(q),
            enable_gqa=q.shape[1] != k.shape[1],
        )


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    """The compiled function; imported and compiled where it is first needed, since both are slow.

    `fullgraph`: where it could not be compiled, the eager form would write out S x S scores.
    """
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    return torch.compile(uncompiled, fullgraph=True)


def _bias(slopes: Tensor | None, offset: int) -> Callable[..., Tensor] | None:
    """ALiBi's bias in FlexAttention's form; query i is key i + offset of the row."""
    if slopes is None:
        return None
    first = constant(offset, torch.int64, slopes.device, "bias")
    return lambda score, b, h, i, j: score - slopes[h] * (i + first - j)


# ---- which blocks of keys a block of queries reaches -----------------------------------------


@dataclass(frozen=True, eq=False)
class _Kept:
    """A tensor as a key: equal as long as it is the same memory, unchanged."""

    tensor: Tensor

    @staticmethod
    def of(tensor: Tensor | None) -> _Kept | None:
        return None if tensor is None else _Kept(tensor)

    @property
    def identity(self) -> tuple[Any, ...]:
        x = self.tensor
        # Tensors of inference mode have no version; nobody changes documents in place.
        version = 0 if x.is_inference() else x._version
        return x.data_ptr(), version, x.shape, x.stride(), x.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


@dataclass(frozen=True)
class _Places:
    """What a block mask depends on."""

    queries: int
    keys: int
    window: int | None
    device: torch.device
    documents: _Kept | None


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _block_mask(places: _Places) -> Any:
    """The block mask; kept, since all layers of a micro-batch share it.

    One made while a model is evaluated may serve training afterwards, which saves it for backward.
    """
    from torch.nn.attention.flex_attention import BlockMask

    some, every = block_reach(
        places.queries,
        places.keys,
        places.window,
        None if places.documents is None else places.documents.tensor,
        places.device,
    )
    partial_count, partial_index = _listed(some & ~every)
    full_count, full_index = _listed(every)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=BLOCK,
        mask_mod=_visible(places),
        seq_lengths=(places.queries, places.keys),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's lists of blocks: how many a row has, and their numbers first.

    Args:
        blocks: [b, query blocks, key blocks] bool.
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _visible(places: _Places) -> Callable[..., Tensor]:
    """`Weighting.visible` in FlexAttention's form.

    Numbers are tensors, so that one compiled form serves every offset and window.
    """
    offset = constant(places.keys - places.queries, torch.int64, places.device, "offset")
    reach = constant(places.window or places.keys, torch.int64, places.device, "reach")

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + offset - j
        return (distance >= 0) & (distance < reach)

    if places.documents is None:
        return seen
    documents = places.documents.tensor

    def seen_in_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen(b, h, i, j) & (documents[b, i + offset] == documents[b, j])

    return seen_in_document


def block_reach(
    queries: int,
    keys: int,
    window: int | None,
    documents: Tensor | None,
    device: torch.device,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Which blocks hold a visible pair, and which hold no other.

    Args:
        documents: [b, keys] int64, never falling, or None.

    Returns:
        Two bool [b or 1, query blocks, key blocks]. Blocks that stick out of the row are never
        whole; of documents that only touch a block's ends, the first may say too much.
    """
    first_i, last_i = _ends(queries, block, device)
    first_i, last_i = first_i + keys - queries, last_i + keys - queries
    first_j, last_j = _ends(keys, block, device)
    nearest = (first_i[:, None] - last_j).clamp(min=0)
    farthest = last_i[:, None] - first_j
    some = farthest >= 0
    every = first_i[:, None] >= last_j
    if window is not None:
        some &= nearest < window
        every &= farthest < window
    every &= (last_i - first_i == block - 1)[:, None] & (last_j - first_j == block - 1)
    some, every = some[None], every[None]
    if documents is not None:
        from_i, to_i = documents[:, first_i, None], documents[:, last_i, None]
        from_j, to_j = documents[:, None, first_j], documents[:, None, last_j]
        some = some & (from_i <= to_j) & (from_j <= to_i)
        every = every & (from_i == to_i) & (from_j == to_j) & (from_i == from_j)
    return some, every


def _ends(length: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of the first and the last element of each block."""
    first = torch.arange(0, length, block, device=device)
    return first, (first + block - 1).clamp(max=length - 1)
