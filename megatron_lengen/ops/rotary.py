"""Rotary positions (Su et al. 2021) in one pass over memory.

Channels i and i + r / 2 of the first r turn by the token's i-th angle, as in Hugging Face and
Megatron-Core. Compiled kernels on the CPU, PyTorch's
compiler on GPUs, its operations elsewhere.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.compat import compiled_when_called
from megatron_lengen.ops import native


class _Call(ctypes.Structure):
    """Mirrors `struct Rotary` in native_fused.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "tokens", "rows", "heads", "width", "turned", "x_token", "x_row", "x_head",
                "threads",
            )
        ),
        ("direction", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("x", "cosine", "sine", "out")),
    )  # fmt: skip


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x with its first r channels turned.

    Args:
        x: [s, b, n, d], strides as they come.
        angles: [s, r / 2], fp32; r even, at most d.

    Returns:
        [s, b, n, d], in x's dtype; fp32 arithmetic in every dtype (fp64 for fp64).
    """
    angles = angles.to(torch.promote_types(x.dtype, torch.float32))
    cosine, sine = angles.cos(), angles.sin()
    if native.serves(x):
        return _Rotate.apply(x, cosine.contiguous(), sine.contiguous())
    return _compiled(x, cosine, sine) if x.is_cuda else _operations(x, cosine, sine)


def _operations(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    cosine, sine = cosine[:, None, None], sine[:, None, None]
    half = cosine.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    a, b = a.to(cosine.dtype), b.to(cosine.dtype)
    turned = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


_compiled = compiled_when_called(_operations)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(x, cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(grad, cosine, sine, -1.0), None, None


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, direction: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, rows, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    call = _Call(
        tokens, rows, heads, width, 2 * cosine.shape[1], *x.stride()[:3], torch.get_num_threads(),
        direction, x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    native.run("rotate", x.dtype, call)
    return out
