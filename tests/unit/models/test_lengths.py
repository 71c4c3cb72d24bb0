"""Rows far longer than those of training, and shorter ones after them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from tiny_models import LENGTH, VOCAB, tiny_config

from megatron_lengen.models.build import InferenceModel, build_chunks

pytestmark = pytest.mark.usefixtures("process_groups")

SCHEMES = {
    "rope": {},
    "yarn": {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0},
    "llama3": {"use_rope_scaling": True, "original_max_position_embeddings": 64},
    "linear": {"rotary_seq_len_interpolation_factor": 3.0},
    "nape": {"position_embedding_type": "nape"},
    "none": {"position_embedding_type": "none"},
    "entmax": {"attention_function": "entmax"},
    "learned": {"query_scaling": "learned", "query_scaling_identity_init": False},
    "log": {"query_scaling": "log"},
    "ssmax": {"query_scaling": "ssmax"},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_longer_rows_begin_like_shorter_ones(name):
    """Causal: what follows changes nothing, and a long call leaves a later short one as it was."""
    config = tiny_config(**SCHEMES[name])
    (chunk,) = build_chunks(config)
    model = InferenceModel(chunk.eval(), config)
    tokens = torch.randint(0, VOCAB, (1, 12 * LENGTH), generator=torch.Generator().manual_seed(0))
    short = model(tokens[:, :LENGTH])
    long = model(tokens)
    assert torch.isfinite(long).all()
    torch.testing.assert_close(long[:, :LENGTH], short, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(tokens[:, :LENGTH]), short)


@pytest.mark.parametrize("name", ["rope", "yarn", "llama3"])
def test_angles_at_position_one_million_are_fp32_in_bf16_models(name):
    config = tiny_config(**SCHEMES[name], bf16=True, params_dtype=torch.bfloat16)
    (chunk,) = build_chunks(config)
    wrapped = Float16Module(config, chunk)
    found = wrapped.module.rotary_pos_emb(1_000_001)
    angles = found[0] if name == "yarn" else found
    assert angles.dtype == torch.float32
    frequencies = angles[1, 0, 0].double()
    torch.testing.assert_close(
        angles[1_000_000, 0, 0].double(), 1_000_000 * frequencies, rtol=2e-7, atol=0
    )
    assert frequencies[0] == 1  # one turn in 2 pi tokens: bf16 could not even tell neighbours
