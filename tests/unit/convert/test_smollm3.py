"""The configuration map of SmolLM3, against transformers' own reading of it."""

import json

import pytest
import torch
from conversion_models import FULL, SLIDING, random_smollm3, tiny_architecture

from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.families import family_for, parse_settings
from megatron_lengen.convert.family import AttentionKind
from megatron_lengen.convert.smollm3 import SmolLM3
from megatron_lengen.convert.to_megatron import effective_config
from megatron_lengen.errors import BadInput

FAMILY = SmolLM3()


def make_config(layers=8, **settings):
    return config_from_architecture(tiny_architecture(num_layers=layers, **settings))


def as_transformers_reads(hf, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(hf))
    return AutoConfig.from_pretrained(tmp_path)


def kinds_of(config):
    """What the modules of transformers' model do under a configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return FAMILY.attention_kinds(AutoModelForCausalLM.from_config(config))


def test_polarity_of_the_two_lists():
    config = make_config(no_rope_freq=4)
    hf = FAMILY.hf_config(config)
    assert config.no_rope_freq == [0, 0, 0, 1, 0, 0, 0, 1]
    assert hf["no_rope_layers"] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert hf["no_rope_layer_interval"] == 4
    back = config_from_architecture(FAMILY.architecture(hf))
    assert back.no_rope_freq == [0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "skips", [[1, 0, 0, 1, 1, 0, 1, 0], [0] * 8, [1] * 8], ids=["irregular", "all", "none"]
)
def test_any_pattern_of_rope_survives(skips, tmp_path):
    config = make_config(no_rope_freq=skips)
    hf = FAMILY.hf_config(config)
    read = as_transformers_reads(hf, tmp_path)
    assert [kind.rope for kind in kinds_of(read)] == [not skip for skip in skips]
    back = config_from_architecture(FAMILY.architecture(read.to_dict()))
    assert back.layer_pattern() == config.layer_pattern()


def test_no_positions_at_all(tmp_path):
    read = as_transformers_reads(
        FAMILY.hf_config(make_config(position_embedding_type="none")), tmp_path
    )
    assert not any(kind.rope for kind in kinds_of(read))


@pytest.mark.parametrize(
    "window",
    [{"window_size": (15, 0)}, {"window_size": [15, 0]}, {"sliding_window": 16}],
    ids=["tuple", "list", "keys"],
)
def test_window_becomes_the_number_of_keys(window, tmp_path):
    hf = FAMILY.hf_config(make_config(**window, window_attn_skip_freq=4, no_rope_freq=4))
    assert hf["sliding_window"] == 16 and hf["use_sliding_window"] is True
    assert hf["layer_types"] == ([SLIDING] * 3 + [FULL]) * 2
    read = as_transformers_reads(hf, tmp_path)
    assert (read.sliding_window, read.layer_types) == (16, hf["layer_types"])
    back = config_from_architecture(FAMILY.architecture(read.to_dict()))
    assert back.window_size == (15, 0)


@pytest.mark.parametrize(
    ("window", "skip", "expected"),
    [
        (16, [1, 1, 1, 0, 1, 1, 1, 0], [16, 16, 16, None] * 2),
        (16, [0, 0, 0, 1, 0, 0, 0, 1], [None, None, None, 16] * 2),
        (16, None, [16] * 8),
        (None, None, [None] * 8),
        (16, [0] * 8, [None] * 8),
    ],
    ids=["on-rope", "on-nope", "everywhere", "no-window", "nowhere"],
)
def test_effective_windows_are_the_trained_ones(window, skip, expected, tmp_path):
    config = make_config(sliding_window=window, window_attn_skip_freq=skip, no_rope_freq=4)
    read = as_transformers_reads(FAMILY.hf_config(config), tmp_path)
    assert kinds_of(read) == [
        AttentionKind(rope, keys)
        for rope, keys in zip([True, True, True, False] * 2, expected, strict=True)
    ]


def test_every_value_is_written_and_read_back(tmp_path):
    config = make_config(
        rotary_base=50_000,
        layernorm_epsilon=3e-6,
        init_method_std=0.013,
        kv_channels=16,
        untie_embeddings_and_output_weights=True,
        no_rope_freq=4,
        sliding_window=8,
        window_attn_skip_freq=4,
    )
    hf = FAMILY.hf_config(config)
    assert hf["rope_theta"] == 50_000
    assert hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 50_000}
    assert hf["head_dim"] == 16
    read = as_transformers_reads(hf, tmp_path)
    assert read.rope_parameters["rope_theta"] == 50_000
    back = config_from_architecture(FAMILY.architecture(read.to_dict())).architecture()
    # The skip number was 4; a list says the same.
    wanted = {**config.architecture(), "window_attn_skip_freq": [1, 1, 1, 0] * 2}
    assert back == wanted


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"add_qkv_bias": True}, "--add-qkv-bias"),
        ({"gated_linear_unit": False}, "--swiglu"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
    ],
)
def test_what_it_cannot_represent_is_refused(settings, reason):
    with pytest.raises(BadInput, match=reason):
        family_for(make_config(**settings))


def test_biases_on_all_projections_are_represented():
    hf = FAMILY.hf_config(make_config(add_bias_linear=True))
    assert hf["attention_bias"] is True and hf["mlp_bias"] is True
    assert FAMILY.architecture(hf)["add_bias_linear"] is True
    with pytest.raises(BadInput, match="attention_bias, mlp_bias: found True, False"):
        FAMILY.architecture({**hf, "mlp_bias": False})


def test_a_window_set_on_the_way_lands_on_the_rope_layers(tmp_path):
    random_smollm3(tmp_path, window=None)
    hf = FAMILY.apply(
        effective_config(tmp_path, FAMILY), parse_settings(["sliding_window=16", "rope_theta=5e4"])
    )
    config = config_from_architecture(FAMILY.architecture(hf))
    assert config.layer_pattern() == [(True, True)] * 3 + [(False, False)]
    assert config.window_size == (15, 0) and config.rotary_base == 50_000
    off = FAMILY.apply(hf, parse_settings(["sliding_window=none"]))
    config = config_from_architecture(FAMILY.architecture(off))
    assert config.window_size is None and not any(k.windowed for k in config.layer_pattern())


def test_layer_types_given_with_the_window_win(tmp_path):
    random_smollm3(tmp_path, window=None)
    items = ["sliding_window=16", f"layer_types={FULL},{FULL},{FULL},{SLIDING}"]
    hf = FAMILY.apply(effective_config(tmp_path, FAMILY), parse_settings(items))
    config = config_from_architecture(FAMILY.architecture(hf))
    assert [kind.windowed for kind in config.layer_pattern()] == [False, False, False, True]


def test_transformers_default_puts_windows_on_the_other_layers(tmp_path):
    """The trap itself, so that a change of it in transformers is noticed; we read what it does."""
    hf = FAMILY.hf_config(make_config(4, no_rope_freq=4))
    hf.update(use_sliding_window=True, sliding_window=8)
    del hf["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = config_from_architecture(FAMILY.architecture(effective_config(tmp_path, FAMILY)))
    assert [kind.windowed for kind in config.layer_pattern()] == [False, False, False, True]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["hidden_size=64"], "--set: found hidden_size; allowed for smollm3: bos_token_id"),
        (["sliding_window"], "allowed: KEY=VALUE"),
        (["sliding_window=0"], "sliding_window: found 0; allowed: 1 or more"),
        (["sliding_window=wide"], "sliding_window: found wide"),
        (["use_sliding_window=true"], "sliding_window: found None"),
        (["no_rope_layers=1,0"], "no_rope_layers: found"),
        (["layer_types=a,b,c,d"], "layer_types: found"),
        ([f"layer_types={SLIDING},{FULL},{FULL},{FULL}"], "use_sliding_window False"),
        (["rope_theta=big"], "found rope_theta big; allowed: a number above 0"),
        (["rope_theta=1", "rope_theta=2"], "rope_theta twice"),
    ],
)
def test_bad_settings_are_refused(items, message, tmp_path):
    random_smollm3(tmp_path, window=None)
    with pytest.raises(BadInput) as caught:
        FAMILY.apply(effective_config(tmp_path, FAMILY), parse_settings(items))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_rope_types_are_refused(tmp_path):
    hf = FAMILY.hf_config(make_config())
    for kind in ("dynamic", "longrope", "proportional", "su"):
        hf["rope_parameters"] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        known = "allowed: default, linear, llama3, yarn"
        with pytest.raises(BadInput, match=f"found rope_type {kind}; {known}"):
            FAMILY.architecture(hf)


def test_pattern_is_read_by_the_names_of_layers():
    assert isinstance(make_config(), LengenConfig)
    with pytest.raises(BadInput, match="--family: found gpt9; allowed: smollm3"):
        family_for(make_config(), "gpt9")
