"""Context parallelism: which tokens of a row a rank holds, and attention to those of others.

A row is cut into 2 x CP chunks of equal length. Rank r holds chunk r and chunk 2 CP - 1 - r, one
from the cheap start of the row and one from its costly end, so that all ranks have the same work
under a causal mask. Megatron-Core cuts rows in the same way, and its rotary angles follow.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.weighting import Weighting


def chunks_of_rank(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks, of 2 x `ranks`, that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def positions_of_rank(length: int) -> Tensor:
    """[length] int64, positions in the row of this context-parallel rank's tokens.

    Args:
        length: tokens on this rank, before sequence parallelism divides them.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return torch.arange(length)
    chunk = length // 2
    starts = chunks_of_rank(parallel_state.get_context_parallel_rank(), ranks)
    return torch.cat([torch.arange(i * chunk, (i + 1) * chunk) for i in starts])


def tokens_of_rank(rows: Tensor) -> Tensor:
    """The tokens of this context-parallel rank: [b, s] -> [b, s / CP]."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return rows
    mine = chunks_of_rank(parallel_state.get_context_parallel_rank(), ranks)
    chunks = rows.unflatten(1, (2 * ranks, -1)).unbind(1)
    return torch.cat([chunks[chunk] for chunk in mine], dim=1)


def attend_across_ranks(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Attention of this rank's queries to the keys of the whole row.

    Keys and values are gathered (their gradients summed back); queries stay. With grouped heads
    they are a fraction of the queries, and recomputing core attention frees them until backward.

    Args:
        q: [s / CP, b, heads, d].
        k, v: [s / CP, b, groups, d].
        weighting: documents are those of the whole row.

    Returns:
        [s / CP, b, heads, d].
    """
    keys, values = (x.permute(1, 2, 0, 3) for x in _gather_row(k, v))
    chunk = q.shape[0] // 2
    mine = chunks_of_rank(
        parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )
    outputs = []
    for part, index in zip(q.permute(1, 2, 0, 3).chunk(2, dim=2), mine, strict=True):
        last, first = (index + 1) * chunk, 0
        if weighting.window is not None:
            first = max(0, last - chunk - weighting.window + 1)
        seen = slice(first, last)
        outputs.append(
            attention(part, keys[:, :, seen], values[:, :, seen], weighting.of_keys(first, last))
        )
    return torch.cat(outputs, dim=2).permute(2, 0, 1, 3)


def _gather_row(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row in order, [s, b, groups, d], in one message."""
    ranks = parallel_state.get_context_parallel_world_size()
    both = gather_from_sequence_parallel_region(
        torch.cat((k, v), dim=-1), group=parallel_state.get_context_parallel_group()
    )
    # Rank by rank, two chunks each -> chunk by chunk.
    held = [chunk for rank in range(ranks) for chunk in chunks_of_rank(rank, ranks)]
    place = [held.index(chunk) for chunk in range(2 * ranks)]
    # Not by indices: those would have to be copied to the device, which waits for it.
    chunks = both.unflatten(0, (2 * ranks, -1)).unbind(0)
    ordered = torch.cat([chunks[i] for i in place])
    return ordered.split((k.shape[-1], v.shape[-1]), dim=-1)
