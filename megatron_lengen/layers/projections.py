"""Projections whose inputs are masked independently (`--dropout-apply-to`).

Megatron fuses q, k, v (and gate, up) into one matrix; here each part gets its own masked input in
training. In evaluation, and for parts without a site, these are Megatron's own layers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_lengen.layers.dropout import DropoutSite
from megatron_lengen.layers.linear import ColumnLinear, RowLinear
from megatron_lengen.ops.products import linear
from megatron_lengen.ops.rmsnorm import affine_dropout


class _MaskedColumns(ColumnLinear):
    """A fused column-parallel projection with one input per part.

    `sites` holds one entry for each of `part_names`, None where the part's input is left alone.
    """

    part_names: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sites: dict[str, DropoutSite | None] = dict.fromkeys(self.part_names)

    @abstractmethod
    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """[output rows, ...] -> one tensor [units, rows of the part, ...] for each part."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, output / tp] and the bias to add later."""
        if not self.training or not any(self.sites.values()):
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True)
        else:
            x = copy_to_tensor_model_parallel_region(input_)
        parts = []
        for site, rows in zip(self.sites.values(), self._split(self.weight), strict=True):
            masked = x if site is None else affine_dropout(x, site.for_tensor(x))
            part = linear(masked, rows.flatten(0, 1))
            parts.append(part.unflatten(-1, rows.shape[:2]))
        output = torch.cat(parts, dim=-1).flatten(-2)
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        return output, self.bias if self.skip_bias_add else None


class MaskedQKV(_MaskedColumns):
    """The attention's input projection; rows are [query heads, key, value] of each group."""

    part_names = ("q", "k", "v")

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        tp = parallel_state.get_tensor_model_parallel_world_size()
        queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
        sizes = (queries, config.kv_channels, config.kv_channels)
        return rows.unflatten(0, (config.num_query_groups // tp, -1)).split(sizes, dim=1)


class MaskedGateUp(_MaskedColumns):
    """The gated MLP's input projection; rows are [gate, up] of each rank."""

    part_names = ("g", "u")

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[None] for part in rows.chunk(2, dim=0))


class MaskedUp(_MaskedColumns):
    """The input projection of an MLP without a gate."""

    part_names = ("u",)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows[None],)


class MaskedRows(RowLinear):
    """A row-parallel projection with a masked input; its features are sharded over TP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.site: DropoutSite | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, input / tp] -> [s, b, output] (a part of s under SP) and the bias."""
        if self.training and self.site is not None:
            rank = parallel_state.get_tensor_model_parallel_rank()
            dropout = self.site.for_tensor(
                input_, rank * input_.shape[-1], parallel_state.get_tensor_model_parallel_group()
            )
            input_ = affine_dropout(input_, dropout)
        return super().forward(input_)
