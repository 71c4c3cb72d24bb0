"""Softmax attention through native_attention.cpp: forward and backward, on the CPU.

Forward keeps its output and one fp32 number a query, the logarithm of its sum; backward computes
the weights of each tile again. Tiles that no query of a block sees are never touched, and
documents and windows are such tiles. Shapes as in `ops.weighting`.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import native
from megatron_lengen.ops.weighting import Weighting, check_shapes

_LANE, _KEYS, _BLOCK = 16, 64, 32
# Queries of a unit, over the heads that share their keys: each reads its keys once.
_UNIT_QUERIES = 512
_UNIT_NUMBERS = _UNIT_QUERIES * 64  # fewer where heads are wide, so that they stay in cache
# Units that are made at least, where rows are long enough; in backward each has its own sums.
_LEAST_UNITS = 16


class _Strided(ctypes.Structure):
    """Mirrors `struct Tensor` in native_attention.cpp."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "head", "token")),
    )


class _Part(ctypes.Structure):
    """Mirrors `struct Part` in native_attention.cpp: spans, tiles of keys, place of the first."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("first_span", "last_span", "first_tile", "last_tile", "place")
    )


class _Call(ctypes.Structure):
    """Mirrors `struct Call` in native_attention.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "rows", "heads", "groups", "queries", "keys", "channels", "values", "window",
                "span", "parts", "threads", "half",
            )
        ),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("slopes", "documents")),
        *((name, _Strided) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("sums", "part", "partial")),
    )  # fmt: skip


def native_attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Softmax attention with weights by `weighting`, without dropout of them.

    Args:
        q: [b, hq, sq, d], fp32 or bf16, on the CPU.
        k: [b, hkv, sk, d], sk >= sq.
        v: [b, hkv, sk, e].

    Returns:
        [b, hq, sq, e], in q's dtype, laid out like q; scores and sums are fp32.

    Raises:
        ValueError: for shapes that do not fit each other.
        RuntimeError: where the kernels could not be built.
    """
    check_shapes(q, k, v)
    return _Native.apply(q, k, v, weighting)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
        output = _like(q, v.shape[3])
        sums = torch.empty(q.shape[:3], dtype=torch.float32)
        given = {"q": q, "k": k, "v": v, "out": output}
        _run("forward", given, {"sums": sums}, weighting)
        ctx.save_for_backward(q, k, v, output, sums)
        ctx.weighting = weighting
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, sums = ctx.saved_tensors
        grads = [_like(x, x.shape[3]) for x in (q, k, v)]
        given = {"q": q, "k": k, "v": v, "out": output, "dout": grad}
        given |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        padded = [-(-x.shape[3] // _LANE) * _LANE for x in (k, v)]
        parts = _parts(q, k, ctx.weighting)
        tiles = sum(part.last_tile - part.first_tile for part in parts)
        partial = torch.empty(*k.shape[:2], tiles, _KEYS * sum(padded), dtype=torch.float32)
        _run("backward", given, {"sums": sums, "partial": partial}, ctx.weighting, parts)
        return grads[0], grads[1], grads[2], None


def _like(x: Tensor, channels: int) -> Tensor:
    """Dense memory with the order of x's dimensions, channels last; no view of anything."""
    if x.stride(3) == 1 and channels == x.shape[3]:
        return torch.empty_like(x)
    return torch.empty(*x.shape[:3], channels, dtype=x.dtype)


def _span(q: Tensor, k: Tensor) -> int:
    """Positions of a unit of work: many read keys seldom, few leave enough units."""
    b, groups = k.shape[:2]
    queries = min(_UNIT_QUERIES, _UNIT_NUMBERS // max(1, q.shape[3])) // (q.shape[1] // groups)
    span = max(1, queries // _BLOCK) * _BLOCK
    while span > _KEYS and b * groups * -(-q.shape[2] // span) < _LEAST_UNITS:
        span = -(-span // (2 * _BLOCK)) * _BLOCK
    return span


def _parts(q: Tensor, k: Tensor, weighting: Weighting) -> list[_Part]:
    """Pieces of a row in backward, each with sums of its own for the keys and values it sees.

    All see about as many keys, documents aside.
    """
    sq, sk = q.shape[2], k.shape[2]
    span, window = _span(q, k), weighting.window or sk
    if not sq:
        return []
    lasts = [min(sk, sk - sq + start + span) for start in range(0, sq, span)]
    seen = list(itertools.accumulate(min(last, window + span) for last in lasts))
    units = max(1, k.shape[0] * k.shape[1])
    wanted = min(len(lasts), -(-_LEAST_UNITS // units))
    ends = sorted({bisect.bisect_left(seen, seen[-1] * n / wanted) + 1 for n in range(1, wanted)})
    parts: list[_Part] = []
    place = 0
    for first, last in itertools.pairwise(
        [0, *(end for end in ends if end < len(lasts)), len(lasts)]
    ):
        begin = max(0, sk - sq + first * span - window + 1) // _KEYS
        end = -(-lasts[last - 1] // _KEYS)
        parts.append(_Part(first, last, begin, end, place))
        place += end - begin
    return parts


def _run(
    name: str,
    tensors: dict[str, Tensor],
    numbers: dict[str, Tensor],
    weighting: Weighting,
    parts: Sequence[_Part] = (),
) -> None:
    """Call one kernel; the tensors it reads stay alive until it returns."""
    library = native.load_library()
    if library is None:
        raise RuntimeError("the CPU kernels could not be built")
    q, k, v = (tensors[name] for name in "qkv")
    b, heads, queries, channels = q.shape
    call = _Call(
        rows=b,
        heads=heads,
        groups=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        channels=channels,
        values=v.shape[3],
        window=min(weighting.window or k.shape[2], k.shape[2]),
        span=_span(q, k),
        parts=len(parts),
        threads=torch.get_num_threads(),
        half=q.dtype == torch.bfloat16,
        scale=weighting.scale_for(q),
    )
    of_parts = (_Part * len(parts))(*parts)
    call.part = ctypes.addressof(of_parts)
    alive = dict(numbers)
    if weighting.slopes is not None:
        alive["slopes"] = weighting.slopes.float().contiguous()
    if weighting.documents is not None:
        alive["documents"] = weighting.documents.long().contiguous()
    for field, tensor in alive.items():
        setattr(call, field, tensor.data_ptr())
    for field, tensor in tensors.items():
        dense = tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()
        alive[field] = dense
        setattr(call, field, _Strided(dense.data_ptr(), *dense.stride()[:3]))
    getattr(library, f"lengen_attention_{name}")(ctypes.byref(call))
