"""Alpha-entmax attention in Triton kernels: memory linear in the length, blocks without weight
left out.

With x = (alpha - 1) score - its largest of the row, e = 1 / (alpha - 1) and u = [x - tau]_+:
weights are u^e, and tau makes them sum to 1. A program has a tile of queries and goes over blocks
of keys several times, from the nearest back to where `ops.reach` says that nothing can have weight:
for the largest scores, for each of Newton's steps (`ops.entmax`), and for the output. Each time it
marks the blocks that can still have weight, and the next time visits no other.

Backward keeps three numbers a query and the marks. With dP = dO V^T and s = u^(e - 1):
    Delta = sum(s dP) / sum(s),   dS = s (dP - Delta),   dQ = scale dS K,   dK = scale dS^T Q,
    dV = weights^T dO.
Keys are never shared between programs that write, so nothing is added atomically.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import entmax_kernels as kernels
from megatron_lengen.ops.reach import first_keys
from megatron_lengen.ops.weighting import Weighting, check_shapes

# Marks of a tile of queries. Where there are more blocks of keys, neighbours share one, so that
# all marks together are linear in the length.
MOST_MARKS = 512


class Blocks(NamedTuple):
    """Queries and keys that a program has at a time, and its warps."""

    queries: int
    keys: int
    warps: int


def blocks_for(channels: int, dtype: torch.dtype) -> Blocks:
    """Sizes that keep a program in registers and shared memory, as compiled for sm_80 and sm_90."""
    wide = triton.next_power_of_2(channels) > 128
    if dtype.itemsize == 4:  # products of fp32 are no work for tensor cores
        return Blocks(16, 16, 8) if wide else Blocks(32, 32, 8)
    if channels <= 64:
        return Blocks(64, 64, 4)
    return Blocks(32, 32, 8) if wide else Blocks(64, 32, 8)


@torch.compiler.disable  # --torch-compile would trace Triton's own launching
def entmax_attention(
    q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, blocks: Blocks | None = None
) -> Tensor:
    """Attention with entmax's weights and without dropout of them, equal to `naive_attention`.

    Args:
        q: [b, hq, sq, d], fp32, bf16 or fp16; d up to 256.
        k, v: [b, hkv, sk, d], sk >= sq.
        blocks: sizes of a program's share; powers of two from 16.

    Returns:
        [b, hq, sq, d], in q's dtype; scores, thresholds and sums are fp32.

    Raises:
        ValueError: for softmax or dropout of weights.
    """
    check_shapes(q, k, v)
    if weighting.alpha == 1 or weighting.dropout is not None:
        raise ValueError("these kernels serve entmax without dropout of weights")
    blocks = blocks or blocks_for(q.shape[3], q.dtype)
    return _EntmaxAttention.apply(q, k, v, weighting, blocks)


class _EntmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, blocks: Blocks
    ) -> Tensor:
        q, k, v = (_dense_rows(x) for x in (q, k, v))
        call = _Call.of(q, k, v, weighting, blocks)
        output = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        largest, threshold, sums = torch.empty(
            3, *q.shape[:3], dtype=torch.float32, device=q.device
        )
        marks = torch.zeros(*q.shape[:2], call.tiles, call.marks, dtype=torch.int8, device=q.device)
        starts = first_keys(q, k, weighting, blocks.queries).to(torch.int32).contiguous()
        with torch.cuda.device_of(q):
            kernels.forward[call.tiles, q.shape[0] * q.shape[1]](
                q, k, v, output, largest, threshold, sums, marks, starts,
                q.stride()[:3], k.stride()[:3], v.stride()[:3],
                *call.arguments, num_warps=blocks.warps,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, largest, threshold, sums, marks, starts)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, largest, threshold, sums, marks, starts = ctx.saved_tensors
        call, grad = ctx.call, _dense_rows(grad.to(q.dtype))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        mean = torch.empty_like(largest)
        live = marks == kernels.WITH_WEIGHT.value
        last = call.tiles - live.flip(2).to(torch.uint8).argmax(2)
        ends = torch.where(live.any(2), last, 0).to(torch.int32)
        strides = [x.stride()[:3] for x in (q, k, v, grad)]
        key_blocks = triton.cdiv(call.keys, call.blocks.keys)
        with torch.cuda.device_of(q):
            kernels.backward_queries[call.tiles, q.shape[0] * q.shape[1]](
                q, k, v, grad, dq, largest, threshold, sums, mean, marks, starts, *strides,
                *call.arguments, num_warps=call.blocks.warps,
            )  # fmt: skip
            kernels.backward_keys[key_blocks, k.shape[0] * k.shape[1]](
                q, k, v, grad, dk, dv, largest, threshold, sums, mean, marks, ends, *strides,
                *call.arguments, num_warps=call.blocks.warps,
            )  # fmt: skip
        return dq, dk, dv, None, None


class _Call(NamedTuple):
    """What the three kernels are told alike."""

    blocks: Blocks
    tiles: int
    marks: int
    keys: int
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, blocks: Blocks) -> _Call:
        (_, heads, queries, channels), (_, groups, keys, _) = q.shape, k.shape
        key_blocks = triton.cdiv(keys, blocks.keys)
        per_mark = triton.cdiv(key_blocks, MOST_MARKS)
        marks = triton.cdiv(key_blocks, per_mark)
        slopes, documents = weighting.slopes, weighting.documents
        if slopes is None:
            slopes = torch.zeros(heads, device=q.device)
        arguments = (
            slopes.float().contiguous(),
            None if documents is None else documents.contiguous(),
            weighting.scale_for(q),
            keys if weighting.window is None else weighting.window,
            heads, heads // groups, queries, keys, channels, v.shape[3],
            per_mark, marks, float(1 / (weighting.alpha - 1)),
            max(16, triton.next_power_of_2(channels)), max(16, triton.next_power_of_2(v.shape[3])),
            blocks.queries, blocks.keys,
        )  # fmt: skip
        return cls(blocks, triton.cdiv(queries, blocks.queries), marks, keys, arguments)


def _dense_rows(x: Tensor) -> Tensor:
    """x, copied if neighbours in its last dimension do not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
