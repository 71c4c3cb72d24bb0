"""Triton kernels of the softmax steps of `ops.linear_cross_entropy`, for CUDA devices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8  # columns of a row at a time


def run(
    step: str, logits: Tensor, labels: Tensor, statistics: Tensor, factors: Tensor | None
) -> None:
    """One step in place; arguments as in `linear_cross_entropy.softmax_step`.

    logits: fp32, bf16 or fp16.
    """
    rows, columns = logits.shape
    block = min(_BLOCK, max(16, triton.next_power_of_2(columns)))
    sizes = (logits.stride(0), columns, block)
    with torch.cuda.device_of(logits):
        if step != "differentiate":
            measure[(rows,)](logits, labels, *statistics, *sizes, num_warps=_WARPS)
        if step != "measure":
            blocks = triton.cdiv(columns, block)
            differentiate[(rows, blocks)](
                logits, labels, statistics[0], statistics[1], factors, *sizes, num_warps=_WARPS
            )


@triton.jit
def _joined(top, sum_of, values):
    """Largest logit and sum of exponentials with a block's logits [BLOCK]."""
    higher = tl.maximum(top, tl.max(values, 0))
    return higher, sum_of * tl.exp(top - higher) + tl.sum(tl.exp(values - higher), 0)


@triton.jit
def measure(logits, labels, largest, total, label, row_stride, columns, BLOCK: tl.constexpr):
    """A row's largest logit, sum of exponentials and label's logit."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * row_stride
    top, sum_of = float("-inf"), 0.0
    # A block that needs no mask is read 16 bytes at a time even if the vocabulary is odd.
    whole = columns // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        values = tl.load(x + first + tl.arange(0, BLOCK)).to(tl.float32)
        top, sum_of = _joined(top, sum_of, values)
    if whole < columns:
        at = whole + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        top, sum_of = _joined(top, sum_of, values)
    column = tl.load(labels + row)
    here = (column >= 0) & (column < columns)
    tl.store(largest + row, top)
    tl.store(total + row, sum_of)
    tl.store(label + row, tl.load(x + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient(values, at, label, largest, total, factor):
    """factor * (softmax - one-hot of the label) of logits in columns `at`, in their dtype."""
    shares = tl.exp(values.to(tl.float32) - largest) / total
    return (factor * tl.where(at == label, shares - 1.0, shares)).to(values.dtype)


@triton.jit
def differentiate(
    logits, labels, largest, total, factors, row_stride, columns, BLOCK: tl.constexpr
):
    """The gradient in place of a block of a row's logits."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = logits + row * row_stride + at
    label, factor = tl.load(labels + row), tl.load(factors + row)
    top, sum_of = tl.load(largest + row), tl.load(total + row)
    if first + BLOCK <= columns:
        tl.store(x, _gradient(tl.load(x), at, label, top, sum_of, factor))
    else:
        inside = at < columns
        values = tl.load(x, mask=inside, other=float("-inf"))
        tl.store(x, _gradient(values, at, label, top, sum_of, factor), mask=inside)
