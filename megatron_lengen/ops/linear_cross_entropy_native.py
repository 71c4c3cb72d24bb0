"""The softmax steps of `ops.linear_cross_entropy` through native_cross_entropy.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_lengen.ops import native


class _Call(ctypes.Structure):
    """Mirrors `struct Call` in native_cross_entropy.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row", "threads")),
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "labels", "factors", "largest", "sum", "label")
        ),
    )


def run(
    step: str,
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    factors: Tensor | None,
) -> None:
    """One step in place; arguments as in `linear_cross_entropy.softmax_step`."""
    rows, columns = logits.shape
    call = _Call(rows=rows, columns=columns, row=logits.stride(0), threads=torch.get_num_threads())
    tensors = dict(zip(("largest", "sum", "label"), statistics, strict=True))
    tensors |= {"logits": logits, "labels": labels}
    if factors is not None:
        tensors["factors"] = factors
    for field, tensor in tensors.items():
        assert tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
        setattr(call, field, tensor.data_ptr())
    native.run(f"logits_{step}", logits.dtype, call)
