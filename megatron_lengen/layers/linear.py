"""Megatron's parallel projections with the CPU's faster products (ops.products).

On GPUs, in 16 bits and for small products these are Megatron's own layers.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

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
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True)
        elif settings["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input)
        output = products.linear(input, weight)
        return output if bias is None else output + bias


class ColumnLinear(_FastProducts, ColumnParallelLinear):
    """A column-parallel projection."""


class RowLinear(_FastProducts, RowParallelLinear):
    """A row-parallel projection."""
