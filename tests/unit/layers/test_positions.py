"""NAPE's heads and slopes against Hugging Face's and the formulas."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.layers.positions import alibi_slopes, head_slopes, heads_without_positions


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16])
def test_the_published_rule_is_that_of_bloom(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    tensor = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [heads, 1, keys]
    expected = (tensor[:, 0, 1] - tensor[:, 0, 0]).tolist()
    assert alibi_slopes(heads, "alibi") == pytest.approx(expected, rel=1e-6)


def test_other_rules():
    assert alibi_slopes(4, "inverse") == [1, 1 / 2, 1 / 3, 1 / 4]
    assert alibi_slopes(8, "power") == [2**-i for i in range(1, 9)]
    assert alibi_slopes(3, "power") == [2 ** (-8 / 3), 2 ** (-16 / 3), 2**-8]
    assert alibi_slopes(4, "relu") == [1, 0.75, 0.5, 0.25]
    assert all(alibi_slopes(0, rule) == [] for rule in ("inverse", "power", "relu", "alibi"))


def test_half_of_the_heads_by_global_number():
    nape = {"position_embedding_type": "nape"}
    assert head_slopes(tiny_config(**nape)) == [1, 0.5, 0, 0]
    odd = tiny_config(**nape, num_attention_heads=3, num_query_groups=3, kv_channels=8)
    assert head_slopes(odd) == [1, 0, 0]
    assert head_slopes(tiny_config(**nape, nape_alibi_heads=3)) == [1, 1 / 2, 1 / 3, 0]
    assert head_slopes(tiny_config()) == [0, 0, 0, 0]


def test_heads_that_know_no_positions():
    nape = tiny_config(position_embedding_type="nape")
    assert heads_without_positions(nape, 0) == [False, False, True, True]
    rotary = tiny_config(no_rope_freq=4)
    assert heads_without_positions(rotary, 0) == [False] * 4
    assert heads_without_positions(rotary, 3) == [True] * 4
