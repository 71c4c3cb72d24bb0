"""Fused parameters whose rows are several things: what a rank holds of each, and checkpoint keys.

The input projection and the convolution of a Mamba2 mixer hold z, x, B, C and dt (mamba_config).
Checkpoints keep them apart, as Megatron-Core's do, so that every layout reads them. Rows that all
tensor-parallel ranks hold are a second parameter, `shared_NAME` beside `NAME`: its gradient norm
counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_lengen.mamba_config import Part

_SHARED = "shared_"


def owned(parts: Sequence[Part]) -> list[Part]:
    """Those that ranks divide."""
    return [part for part in parts if part.sharded]


def replicated(parts: Sequence[Part]) -> list[Part]:
    """Those that every rank holds."""
    return [part for part in parts if not part.sharded]


def local_rows(part: Part) -> int:
    """Rows of a part on this rank."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return part.rows // ranks if part.sharded else part.rows


def parameter_of(parts: Sequence[Part], shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """[this rank's rows of all parts, *shape], to be filled.

    Args:
        parts: all divided or all replicated.
    """
    rows = sum(local_rows(part) for part in parts)
    parameter = nn.Parameter(torch.zeros(rows, *shape, dtype=dtype))
    parameter.parts = list(parts)  # type: ignore[attr-defined]
    return divided(parameter) if parts[0].sharded else parameter


def divided(parameter: nn.Parameter) -> nn.Parameter:
    """Marks a parameter as divided over tensor-parallel ranks by rows, as Megatron does."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
    return parameter


def key_of(name: str, part: Part) -> str:
    """The checkpoint's name of a part of a parameter."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{leaf.removeprefix(_SHARED)}.{part.name}"


def cut(part: Part, full: Tensor) -> Tensor:
    """This rank's rows of a whole part."""
    if not part.sharded:
        return full
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return full.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]


def sharded_parameters(
    module: nn.Module, prefix: str, sharded_offsets: tuple = ()
) -> ShardedStateDict:
    """Every parameter of a module for a distributed checkpoint, parts under keys of their own."""
    plain, axes, state = {}, {}, {}
    for name, parameter in module.named_parameters():
        parts = getattr(parameter, "parts", None)
        if parts is not None:
            state[prefix + name] = _factory(prefix + name, parameter, parts, sharded_offsets)
            continue
        plain[name] = parameter
        if getattr(parameter, "tensor_model_parallel", False):
            axes[name] = parameter.partition_dim  # type: ignore[attr-defined]
    state.update(make_sharded_tensors_for_checkpoint(plain, prefix, axes, sharded_offsets))
    return state


def _factory(
    name: str, parameter: nn.Parameter, parts: Sequence[Part], offsets: tuple
) -> ShardedTensorFactory:
    axis = len(offsets)
    tp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)

    @torch.no_grad()
    def split(
        key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        if flattened_range is not None:
            raise RuntimeError(f"{key}: parts of a flattened tensor are not kept apart")
        pieces = tensor.split([local_rows(part) for part in parts])
        return [
            ShardedTensor.from_rank_offsets(
                key_of(key, part),
                piece,
                *offsets,
                *([(axis, *tp)] if part.sharded else []),
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            for part, piece in zip(parts, pieces, strict=True)
        ]

    def join(pieces: Any) -> Tensor:
        return torch.cat(pieces)

    replica = (0, 0 if parts[0].sharded else tp[0], data_rank)
    return ShardedTensorFactory(name, parameter, split, join, replica)
