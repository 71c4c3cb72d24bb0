"""Logits of our models and of their Hugging Face forms, whoever's code those need.

`reference_logits`, in float64 and written from the definitions, is the third party.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "convert"))

from conversion_models import random_checkpoint, reference_logits

from megatron_lengen.convert.families import Lengen
from megatron_lengen.convert.family import acting_settings
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf, load_checkpoint_as_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.verify import VerificationError

SMOLLM3 = {"no_rope_freq": 4, "sliding_window": 8, "window_attn_skip_freq": 4}
LEARNED = {"query_scaling": "learned"}
NAPE = {"position_embedding_type": "nape", "untie_embeddings_and_output_weights": True}
ENTMAX = {"attention_function": "entmax"}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
CASES = {
    "scaled-smollm3": ("lengen", {**SMOLLM3, **LEARNED}),
    "scaled-nope-layers": (
        "lengen",
        {
            **SMOLLM3,
            **LEARNED,
            "query_scaling_scope": "nope",
            "query_scaling_coef_activation": "softplus_shifted",
            "query_scaling_coef_shift": 1.0,
            "query_scaling_coef_bound": 0.7,
            "query_scaling_pow_bound": 1.5,
            "query_scaling_log_base": 2.718281828,
            "query_scaling_proj_bias": False,
            "query_scaling_weight_scale": 0.5,
            "query_scaling_identity_init": False,
        },
    ),
    "nape-llama": ("lengen", {**NAPE, "num_query_groups": 4}),
    "nape-entmax-scaled": (
        "lengen",
        {
            **NAPE,
            **ENTMAX,
            **LEARNED,
            "query_scaling_scope": "nope",
            "nape_alibi_heads": 3,
            "alibi_slopes": "alibi",
        },
    ),
    "nape-log": ("lengen", {**NAPE, "query_scaling": "log"}),
    "entmax-smollm3": ("lengen", {**SMOLLM3, **ENTMAX, "entmax_alpha": 1.3}),
    "ssmax-yarn": ("lengen", {**SMOLLM3, **YARN, "query_scaling": "ssmax"}),
    "yarn-smollm3": ("smollm3", {**SMOLLM3, **YARN}),
    "yarn-llama": ("llama", YARN),
    "llama-untied": ("llama", {"untie_embeddings_and_output_weights": True, "num_query_groups": 4}),
}


def silent(line):
    pass


@pytest.fixture(autouse=True)
def modules_of_models(tmp_path, monkeypatch):
    """Code of models that transformers copies before it runs it goes away with the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize(("family", "settings"), CASES.values(), ids=CASES.keys())
def test_logits_agree_and_the_round_trip_is_bitwise(family, settings, tmp_path):
    from transformers import AutoModelForCausalLM

    random_checkpoint(tmp_path / "c", **settings)
    name = family if family == "llama" else None  # a SmolLM3 can be it, too, and comes first
    measured = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", family=name, report=silent)
    assert max(measured.differences) < 1e-4 and min(measured.scales) > 1
    own_code = family == "lengen"
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "o", trust_remote_code=own_code, output_loading_info=True
    )
    assert not any(loading.values()) and model.config.model_type == family
    opened = open_checkpoint(tmp_path / "c")
    for length in (1, 9, 70):
        tokens = torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(length))
        expected = reference_logits(opened.config(), opened.read, tokens)
        with torch.inference_mode():
            assert (model(tokens[None]).logits[0] - expected).abs().max() < 1e-4

    hf_to_checkpoint(tmp_path / "o", tmp_path / "again", report=silent)
    again = open_checkpoint(tmp_path / "again")
    assert set(again.model_keys) == set(opened.model_keys)
    assert all(torch.equal(again.read(key), opened.read(key)) for key in opened.model_keys)
    assert acting_settings(again.config()) == acting_settings(opened.config())
    # Without a word of the user it goes back to what it came from.
    checkpoint_to_hf(tmp_path / "again", tmp_path / "back", verify=False, report=silent)
    assert (tmp_path / "back" / "config.json").read_text() == (
        tmp_path / "o" / "config.json"
    ).read_text()
