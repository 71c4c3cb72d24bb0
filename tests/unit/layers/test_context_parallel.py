"""What a rank holds of a row, and how a row is put together again, without other processes."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from megatron_lengen.layers import context_parallel
from megatron_lengen.layers.context_parallel import positions_of_rank, tokens_of_rank

RANKS = 3
CHUNKS = {0: (0, 5), 1: (1, 4), 2: (2, 3)}  # of six: the first ones and those before the end


@pytest.fixture
def rank(monkeypatch):
    """Makes this process one of three."""
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: RANKS)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: None)

    def be(number: int) -> int:
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: number)
        return number

    return be


@pytest.mark.parametrize("number", range(RANKS))
def test_a_rank_holds_two_chunks(rank, number):
    rows = torch.arange(24).view(2, 12)
    first, second = CHUNKS[rank(number)]
    expected = [[row + 2 * i + j for i in (first, second) for j in (0, 1)] for row in (0, 12)]
    assert tokens_of_rank(rows).tolist() == expected
    assert positions_of_rank(4).tolist() == expected[0]


def test_a_row_that_is_gathered_is_in_order(rank, monkeypatch):
    row = torch.arange(12.0)[:, None, None, None] + torch.tensor([0.0, 0.25, 0.5])  # [s, 1, 1, 3]
    held = [row[positions_of_rank(4)] for _ in map(rank, range(RANKS))]
    shards = [shard.clone().requires_grad_() for shard in held]
    monkeypatch.setattr(
        context_parallel,
        "gather_from_sequence_parallel_region",
        lambda own, group: torch.cat(shards),
    )
    keys, values = context_parallel._gather_row(held[0][..., :2], held[0][..., 2:])
    assert torch.equal(keys, row[..., :2]) and torch.equal(values, row[..., 2:])
    weights = torch.arange(12.0)[:, None, None, None]
    (keys * weights).sum().backward()
    for number, shard in enumerate(shards):
        rank(number)
        assert torch.equal(shard.grad[:, 0, 0, 0], positions_of_rank(4).float())
