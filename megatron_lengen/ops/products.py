"""Products of fp32 matrices on the CPU, by the faster of PyTorch's two libraries.

PyTorch multiplies fp32 matrices with MKL, which keeps to 256-bit vectors on processors that are not
Intel's; oneDNN, which comes with PyTorch too and multiplies its 16-bit ones, does not and is faster
there where vectors are wider. Small products, other dtypes, devices and processors stay with
`torch.matmul`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Multiply-adds below which finding oneDNN's kernel takes longer than it saves.
SMALLEST = 1 << 21


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this PyTorch and this processor are of the kind described above."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # PyTorch's own compiler calls it
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and "GenuineIntel" not in processor


def product(a: Tensor, b: Tensor, memory: Tensor | None = None) -> Tensor:
    """[..., m, k] and [k, n], strides as they come -> [..., m, n].

    Args:
        memory: [..., m, n] of nobody else, in which the result may be.
    """
    if not _served(a, b, a.numel() * b.shape[-1]):
        return torch.matmul(a, b, out=memory)
    # oneDNN packs its second operand, at a crawl where rows of it are apart in memory.
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """[..., m] and [..., n] -> [m, n], summed over all rows: a weight's gradient."""
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    if not _served(a, b, a.numel() * b.shape[-1]):
        return a.t() @ b
    # The first operand is copied where it is transposed: better the narrow one.
    if a.shape[1] > b.shape[1]:
        return product(b.t(), a).t()
    return product(a.t(), b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            product(grad, weight) if needs_x else None,
            transposed_product(grad, x) if needs_weight else None,
        )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of x [..., k] and W [n, k] -> [..., n]; gradients by the same products."""
    # Rows in one dimension: what the function returns is then no view, and may be changed in place.
    rows = _Linear.apply(x.reshape(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[0])


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` would not go to `torch.matmul` for x [..., k] and W [n, k]."""
    return _served(x, weight, x.numel() * weight.shape[0])


def _served(a: Tensor, b: Tensor, multiplications: int) -> bool:
    return (
        multiplications >= SMALLEST
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
    )
