"""NAPE's heads and slopes, and YaRN's angles, against Hugging Face's and the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.layers.positions import alibi_slopes, head_slopes, heads_without_positions
from megatron_lengen.models.build import build_chunk


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


@pytest.mark.parametrize("factor", [4.0, 8.0])
@pytest.mark.parametrize("extra", [{}, {"mscale": 1.0, "mscale_all_dim": 0.8}], ids=["", "mscale"])
def test_yarn_equals_hugging_faces(process_groups, factor, extra):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=int(65536 * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5e6,
            "factor": factor,
            "original_max_position_embeddings": 65536,
            **extra,
        },
    )
    inverse, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    config = tiny_config(
        position_embedding_type="yarn",
        hidden_size=512,
        num_query_groups=4,
        rotary_base=5e6,
        rotary_scaling_factor=factor,
        original_max_position_embeddings=65536,
        **extra,
    )
    angles, scale = build_chunk(config).rotary_pos_emb(200)
    assert scale == pytest.approx(attention_factor, rel=1e-6)
    positions = torch.arange(200, dtype=torch.float64)[:, None]
    expected = torch.cat([positions * inverse.double()] * 2, dim=-1)
    torch.testing.assert_close(angles[:, 0, 0].double(), expected, rtol=1e-5, atol=1e-6)


def test_yarn_starts_from_the_declared_positions(process_groups):
    config = tiny_config(
        position_embedding_type="yarn", rotary_scaling_factor=2.0, max_position_embeddings=48
    )
    assert config.original_max_position_embeddings == 48
    _, scale = build_chunk(config).rotary_pos_emb(8)
    assert scale == pytest.approx(0.1 * math.log(2) + 1)


def test_rope_is_not_scaled(process_groups):
    """Megatron-Core applies YaRN's factor wherever it finds YaRN's settings."""
    assert not hasattr(tiny_config(), "yarn_rotary_scaling_factor")
