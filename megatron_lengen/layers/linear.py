"""Megatron's parallel projections with the CPU's faster products (ops.products).

On GPUs, in 16 bits and for small products these are Megatron's own layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_global_memory_buffer,
    get_tensor_model_parallel_group,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import products


class _FastProducts:
    """Replaces the arithmetic of a Megatron projection, where that is faster."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """[s, b, h] (a part of s under SP), [n, h] and [n] -> [s, b, n]."""
        if not products.serves(input, weight):
            return super()._forward_impl(input, weight, bias=bias, **settings)  # type: ignore[misc]
        if settings["sequence_parallel"]:
            output = _GatheredLinear.apply(input, weight)
        else:
            if settings["allreduce_dgrad"]:
                input = copy_to_tensor_model_parallel_region(input)
            output = products.linear(input, weight)
        return output if bias is None else output + bias


class _GatheredLinear(torch.autograd.Function):
    """A product with the rows of all ranks of sequence parallelism.

    It keeps this rank's rows only and gathers the others' again, as Megatron's does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return products.product(_all_rows(x), weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = reduce_scatter_to_sequence_parallel_region(products.product(grad, weight))
        return dx, products.transposed_product(grad, _all_rows(x))


def _all_rows(x: Tensor) -> Tensor:
    """[s / tp, b, h] -> [s, b, h], in the buffer that Megatron's projections share."""
    group = get_tensor_model_parallel_group()
    shape = [x.shape[0] * group.size(), *x.shape[1:]]
    rows = get_global_memory_buffer().get_tensor(shape, x.dtype, "mpu")
    dist.all_gather_into_tensor(rows, x.contiguous(), group=group)
    return rows


class ColumnLinear(_FastProducts, ColumnParallelLinear):
    """A column-parallel projection."""


class RowLinear(_FastProducts, RowParallelLinear):
    """A row-parallel projection."""
