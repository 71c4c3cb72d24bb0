"""The gate of a SwiGLU feed-forward (Shazeer 2020), silu(gate) * up, in one pass over memory.

Backward keeps only the projection's output. Compiled kernels on the CPU, PyTorch's
compiler on GPUs, its operations elsewhere.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.compat import compiled_when_called
from megatron_lengen.ops import native


class _Call(ctypes.Structure):
    """Mirrors `struct Glu` in native_fused.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "width", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "dz", "out")),
    )


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 f] = [gate, up] -> [..., f]; fp32 arithmetic in every dtype."""
    if native.serves(x):
        return _SwiGLU.apply(x)
    return _compiled(x) if x.is_cuda else _operations(x)


def _operations(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(x.dtype)


_compiled = compiled_when_called(_operations)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        z = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype)
        _run("swiglu", x, None, z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _run("swiglu_backward", x, dz.to(x.dtype).contiguous(), dx)
        return dx


def _run(name: str, x: Tensor, dz: Tensor | None, out: Tensor) -> None:
    width = x.shape[-1] // 2
    call = _Call(
        rows=x.numel() // (2 * width),
        width=width,
        threads=torch.get_num_threads(),
        x=x.data_ptr(),
        dz=None if dz is None else dz.data_ptr(),
        out=out.data_ptr(),
    )
    native.run(name, x.dtype, call)
