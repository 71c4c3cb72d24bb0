"""Rotary frequencies against transformers' own, for every kind of scaling and several sizes."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.convert.rotary import rotary_fields
from megatron_lengen.models.build import build_chunk

pytestmark = pytest.mark.usefixtures("process_groups")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, no power of two": {"rope_type": "linear", "factor": 2.7},
    "llama3": LLAMA3,
    "llama3 of 3.2": {**LLAMA3, "factor": 32.0},
    "llama3, other turns": {
        **LLAMA3,
        "factor": 3.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 17.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": YARN,
    "yarn by 8": {**YARN, "factor": 8.0, "beta_fast": 16.0},
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
}


def theirs(rotary: dict, channels: int) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and its factor on cosines and sines."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * channels,
        num_attention_heads=4,
        max_position_embeddings=262144,
        rope_parameters=dict(rotary),
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq, embedding.attention_scaling


def ours(rotary: dict, channels: int, **changes) -> tuple[torch.Tensor, float]:
    """Angles [positions, channels] of the first 200 positions and the factor."""
    config = tiny_config(kv_channels=channels, **rotary_fields(rotary), **changes)
    found = build_chunk(config).rotary_pos_emb(200)
    angles, factor = found if config.position_embedding_type == "yarn" else (found, 1.0)
    return angles[:, 0, 0], factor


@pytest.mark.parametrize(("theta", "channels"), [(1e4, 8), (5e5, 64), (5e6, 128)])
@pytest.mark.parametrize("rotary", KINDS.values(), ids=KINDS)
def test_angles_equal_hugging_faces(rotary, theta, channels):
    rotary = {**rotary, "rope_theta": theta}
    expected, their_factor = theirs(rotary, channels)
    angles, factor = ours(rotary, channels)
    assert angles.dtype == torch.float32
    assert factor == pytest.approx(their_factor, rel=1e-6)
    # Three roundings of fp32 at most; Megatron-Core's yarn computes its base in another order.
    tolerance = 1e-6 if rotary["rope_type"] == "yarn" else 2e-7
    torch.testing.assert_close(angles[1], torch.cat([expected] * 2), rtol=tolerance, atol=0)
    positions = torch.arange(200, dtype=torch.float64)[:, None]
    torch.testing.assert_close(angles.double(), positions * angles[1].double(), rtol=1.2e-7, atol=0)


def test_llama_scaling_has_megatrons_numbers_by_default():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config = tiny_config(kv_channels=64, rotary_base=5e5, use_rope_scaling=True)
    expected = RotaryEmbedding(64, 1.0, rotary_base=5e5, rope_scaling=True).inv_freq
    found = build_chunk(config).rotary_pos_emb.inv_freq
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
    assert config.original_max_position_embeddings == 8192
    plain = build_chunk(tiny_config(kv_channels=64, rotary_base=5e5)).rotary_pos_emb.inv_freq
    assert (found[-1] / plain[-1]).item() == pytest.approx(1 / 8) and found[0] == plain[0] == 1


def test_yarn_starts_from_the_declared_positions():
    config = tiny_config(
        position_embedding_type="yarn", rotary_scaling_factor=2.0, max_position_embeddings=48
    )
    assert config.original_max_position_embeddings == 48
    _, scale = build_chunk(config).rotary_pos_emb(8)
    assert scale == pytest.approx(0.1 * math.log(2) + 1)


def test_rope_is_not_scaled():
    """Megatron-Core applies YaRN's factor wherever it finds YaRN's settings."""
    assert not hasattr(tiny_config(), "yarn_rotary_scaling_factor")
