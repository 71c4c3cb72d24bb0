"""Every field of a model's description is carried by a family or refused, never dropped."""

import pytest
from conversion_models import tiny_architecture

from megatron_lengen import config as config_module
from megatron_lengen.config import ARCHITECTURE_FIELDS, config_from_architecture
from megatron_lengen.convert.families import (
    families,
    family_for,
    family_named,
    family_of,
    parse_renames,
)
from megatron_lengen.errors import BadInput

SMOL, OWN = {"smollm3", "lengen"}, {"lengen"}
ALL = SMOL | {"llama", "mistral"}
NONE: set[str] = set()
WINDOW = {"sliding_window": 8}
YARN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "beta_fast": 16.0}
LLAMA3 = {"use_rope_scaling": True}
NAPE = {"position_embedding_type": "nape"}
LEARNED = {"query_scaling": "learned"}
SHIFTED = {**LEARNED, "query_scaling_coef_activation": "softplus_shifted"}
# A value that is not the default, what it needs to act, and who carries it.
FIELDS = {
    "num_layers": (5, {}, ALL),
    "hidden_size": (64, {}, ALL),
    "ffn_hidden_size": (80, {}, ALL),
    "num_attention_heads": (8, {}, ALL),
    "num_query_groups": (4, {}, ALL),
    "kv_channels": (16, {}, ALL),
    "layernorm_epsilon": (3e-6, {}, ALL),
    "gated_linear_unit": (False, {}, NONE),
    "add_bias_linear": (True, {}, ALL - {"mistral"}),
    "add_qkv_bias": (True, {}, NONE),
    "vocab_size": (99, {}, ALL),
    "max_position_embeddings": (256, {}, ALL),
    "position_embedding_type": ("none", {}, SMOL),
    "rotary_base": (5e5, {}, ALL),
    "rotary_percent": (0.5, {}, NONE),
    "use_rope_scaling": (True, {}, ALL),
    "rope_scaling_factor": (4.0, LLAMA3, ALL),
    "low_freq_factor": (2.0, LLAMA3, ALL),
    "high_freq_factor": (8.0, LLAMA3, ALL),
    "rotary_seq_len_interpolation_factor": (2.5, {}, ALL),
    "rotary_scaling_factor": (8.0, YARN, ALL),
    "original_max_position_embeddings": (64, YARN, ALL),
    "beta_fast": (8.0, YARN, ALL),
    "beta_slow": (2.0, YARN, ALL),
    "mscale": (0.7, {**YARN, "mscale_all_dim": 0.5}, ALL),
    "mscale_all_dim": (0.5, {**YARN, "mscale": 0.7}, ALL),
    "nape_alibi_heads": (3, NAPE, OWN),
    "alibi_slopes": ("relu", {**NAPE, "nape_alibi_heads": 3}, OWN),
    "attention_function": ("entmax", {}, OWN),
    "entmax_alpha": (1.3, {"attention_function": "entmax"}, OWN),
    "query_scaling": ("log", {}, OWN),
    "query_scaling_scope": ("nope", {**LEARNED, "no_rope_freq": 2}, OWN),
    "query_scaling_coef_bound": (0.5, LEARNED, OWN),
    "query_scaling_pow_bound": (1.5, LEARNED, OWN),
    "query_scaling_coef_activation": ("softplus_shifted", LEARNED, OWN),
    "query_scaling_coef_shift": (9.0, SHIFTED, OWN),
    "query_scaling_log_base": (10.0, LEARNED, OWN),
    "query_scaling_proj_bias": (False, SHIFTED, OWN),
    "query_scaling_weight_scale": (0.25, LEARNED, OWN),
    "query_scaling_identity_init": (False, LEARNED, OWN),
    "untie_embeddings_and_output_weights": (True, {}, ALL),
    "sliding_window": (16, {}, ALL - {"llama"}),
    "window_attn_skip_freq": ([1, 0, 1, 1], WINDOW, SMOL),
    "no_rope_freq": ([0, 1, 0, 0], {}, SMOL),
    "init_method_std": (0.013, {}, ALL),
}
# Rows of padding: nothing of the model, and written by nobody.
OF_THE_LAYOUT = {"make_vocab_size_divisible_by"}


def make_config(**settings):
    return config_from_architecture(tiny_architecture(**settings))


def test_the_table_has_every_field():
    assert set(FIELDS) | OF_THE_LAYOUT == set(ARCHITECTURE_FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_carried_or_refused(field):
    value, needs, carriers = FIELDS[field]
    config = make_config(**{**needs, field: value})
    assert getattr(make_config(), field) != getattr(config, field) == value
    for family in families():
        if family.name not in carriers:
            with pytest.raises(BadInput, match=f"to-hf: {family.name} cannot represent ") as caught:
                family_for(config, family.name)
            assert "\n" not in str(caught.value)
            continue
        hf = family_for(config, family.name).hf_config(config)
        back = config_from_architecture(family.architecture(hf))
        assert getattr(back, field) == value, family.name
        assert back.layer_pattern() == config.layer_pattern()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (LEARNED, "--query-scaling learned"),
        ({"query_scaling": "log"}, "--query-scaling log"),
        ({"attention_function": "entmax"}, "--attention-function entmax"),
        ({"attention_function": "entmax", **NAPE}, "--position-embedding-type nape"),
    ],
)
def test_stock_families_name_the_flag(settings, reason):
    with pytest.raises(BadInput, match=f"smollm3 cannot represent {reason}"):
        family_for(make_config(**settings), "smollm3")


def test_a_field_of_the_future_is_refused(monkeypatch):
    """One that no family knows of, as soon as it is not at its default."""
    fields = (*ARCHITECTURE_FIELDS, "document_boundaries")
    monkeypatch.setattr(config_module, "ARCHITECTURE_FIELDS", fields)
    assert family_for(make_config(document_boundaries="ignore")).name == "smollm3"
    with pytest.raises(BadInput, match="lengen cannot represent --document-boundaries mask"):
        family_for(make_config(document_boundaries="mask"))


def test_what_is_idle_is_no_reason():
    """Settings of what is off, and two ways to say the same."""
    idle = {
        "entmax_alpha": 1.7,
        "query_scaling_coef_bound": 3.0,
        "beta_fast": 8.0,
        "alibi_slopes": "relu",
        "make_vocab_size_divisible_by": 8,
    }
    assert family_for(make_config(**idle)).name == "smollm3"
    without = {**NAPE, "nape_alibi_heads": 0}
    assert family_for(make_config(**without)).name == "smollm3"
    assert family_for(make_config(), source="llama").name == "llama"
    assert family_for(make_config(**WINDOW), source="llama").name == "smollm3"
    assert family_for(make_config(**WINDOW), source="mistral").name == "mistral"
    with pytest.raises(BadInput, match="llama cannot represent --hidden-size 30"):
        family_for(make_config(hidden_size=30, kv_channels=8), "llama")


def test_slopes_are_written_head_by_head_and_read_as_a_rule():
    family = family_named("lengen")
    hf = family.hf_config(make_config(**NAPE))
    assert hf["attention_alibi_slopes"] == [1.0, 0.5, 0.0, 0.0] and hf["no_rope_layers"] == [0] * 4
    for slopes in ([1.0, 0.4, 0.0, 0.0], [0.0, 0.0, 1.0, 0.5], [1.0, 0.5]):
        with pytest.raises(BadInput, match="attention_alibi_slopes: found"):
            family.architecture({**hf, "attention_alibi_slopes": slopes})
    rotary = {**hf, "no_rope_layers": [1, 0, 0, 0]}
    with pytest.raises(BadInput, match="attention_alibi_slopes: found with rotary positions"):
        family.architecture(rotary)


def test_entries_of_scaling_have_the_published_names():
    hf = family_named("lengen").hf_config(make_config(**SHIFTED, query_scaling_coef_bound=0.5))
    expected = {
        "attention_scaling_enabled": True,
        "attention_scaling_coef_bound": 0.5,
        "attention_scaling_pow_bound": 2.0,
        "attention_scaling_identity_init": True,
        "attention_scaling_proj_bias": True,
        "attention_scaling_coef_activation": "softplus_shifted",
        "attention_scaling_weight_scale_alpha": 1.0,
    }
    assert expected.items() <= hf.items()


def test_yarn_in_and_out():
    llama = family_named("llama")
    hf = llama.hf_config(make_config(**YARN))
    rotary = hf["rope_parameters"]
    assert rotary["rope_type"] == "yarn" and rotary["factor"] == 4.0
    assert rotary["original_max_position_embeddings"] == 128

    def read(**changes):
        return llama.architecture({**hf, "rope_parameters": {**rotary, **changes}})

    # 0.1 ln 4 + 1
    assert read(attention_factor=1.138629436)["rotary_scaling_factor"] == 4.0
    for changes, message in (
        ({"attention_factor": 1.0}, "found attention_factor 1.0; allowed: 1.13863"),
        ({"truncate": False}, "found truncate false"),
        ({"factor": None}, "found factor None"),
        ({"factor": 0.5}, "found factor 0.5; allowed: 1 or more"),
        ({"rope_type": "linear", "factor": True}, "found factor True"),
        ({"rope_type": "llama3"}, "found low_freq_factor None; allowed: a number above 0"),
        (
            {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4.0},
            "found low_freq_factor 4 and high_freq_factor 4.0; allowed: low below high",
        ),
        ({"original_max_position_embeddings": 0}, "found original_max_position_embeddings 0"),
        ({"beta_fast": "wide"}, "found beta_fast wide"),
        ({"mscale": "1", "mscale_all_dim": 1.0}, "found mscale 1; allowed: a number above 0"),
        ({"attention_factor": "1"}, "found attention_factor 1; allowed: a number above 0"),
        ({"rope_theta": 0}, "rope_parameters: found rope_theta 0; allowed: a number above 0"),
        ({"rope_type": "dynamic"}, "found rope_type dynamic; allowed: default, linear, llama3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5"),
    ):
        with pytest.raises(BadInput, match=message):
            read(**changes)


def test_scalings_put_on_the_way():
    """What Llama 3.1's needs has its own values, positions those declared until then."""
    llama = family_named("llama")
    hf = llama.hf_config(make_config())

    def config(**rotary):
        out = llama.apply(hf, {"rope_parameters": rotary, "max_position_embeddings": 512})
        return config_from_architecture(llama.architecture(out))

    plain = make_config()
    found = config(rope_type="llama3", factor=2, high_freq_factor=3)
    assert found.use_rope_scaling and found.original_max_position_embeddings == 128
    assert (found.rope_scaling_factor, found.low_freq_factor, found.high_freq_factor) == (2, 1, 3)
    assert found.rotary_base == plain.rotary_base
    found = config(rope_type="linear", factor=4)
    assert found.rotary_seq_len_interpolation_factor == 4 and not found.use_rope_scaling
    with pytest.raises(BadInput, match="found rope_type dynamic"):
        config(rope_type="dynamic", factor=4)
    with pytest.raises(BadInput, match="rope_parameters: found factor None"):
        config(rope_type="linear")


def test_yarn_put_on_the_way():
    """The positions before stretching are those that the model was declared for until then."""
    llama = family_named("llama")
    hf = llama.hf_config(make_config(rotary_base=7e4))
    settings = {"rope_parameters": {"rope_type": "yarn", "factor": 4}}
    out = llama.apply(hf, {**settings, "max_position_embeddings": 512})
    config = config_from_architecture(llama.architecture(out))
    assert (config.rotary_base, config.original_max_position_embeddings) == (7e4, 128)
    assert (config.rotary_scaling_factor, config.max_position_embeddings) == (4, 512)
    with pytest.raises(BadInput, match="--set rope_parameters: found yarn"):
        llama.apply(hf, {"rope_parameters": "yarn"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_scaling_coef_bound": "wide"}, "found wide; allowed: a number"),
        ({"attention_scaling_proj_bias": 1}, "found 1; allowed: true, false"),
        ({"attention_scaling_scope": 3}, "found 3; allowed: a word"),
        ({"hidden_size": 3}, "--set: found hidden_size; allowed for lengen"),
        (
            {"sliding_window": "wide"},
            "sliding_window: found wide; allowed: 1 or more keys, or none",
        ),
    ],
)
def test_bad_settings_are_refused(settings, message):
    family = family_named("lengen")
    with pytest.raises(BadInput, match=message):
        family.apply(family.hf_config(make_config(**LEARNED)), settings)


def test_checkpoints_of_others_say_what_they_are_or_the_user_does():
    """The published README names no shift, and no layers, of scaled checkpoints."""
    raw = {
        "model_type": "smollm3",
        "attention_scaling_enabled": True,
        "attention_scaling_coef_bound": 1.0,
        "attention_scaling_pow_bound": 2.0,
        "attention_scaling_proj_bias": True,
        "attention_scaling_coef_activation": "softplus_shifted",
        "attention_scaling_weight_scale_alpha": 1.0,
    }
    family = family_of(raw)
    assert family.name == "lengen"
    needs = "attention_scaling_coef_shift, attention_scaling_scope"
    with pytest.raises(BadInput, match=f"config.json: does not say {needs}; allowed: --set"):
        family.check_source(raw, {})
    given = {"attention_scaling_coef_shift": 5.0, "attention_scaling_scope": "nope"}
    family.check_source(raw, given)
    sigmoid = {**raw, "attention_scaling_coef_activation": "sigmoid"}
    family.check_source(sigmoid, {"attention_scaling_scope": "all"})
    assert family_of({**raw, "attention_scaling_enabled": False}).name == "smollm3"
    with pytest.raises(BadInput, match="--family: found llama; the folder holds a smollm3"):
        family_named("llama").check_source(raw, {})


def test_renamings():
    assert parse_renames(["beta_proj.weight=coef_weight", "a=b"]) == {
        "beta_proj.weight": "coef_weight",
        "a": "b",
    }
    for item in ("a", "a=", "=b"):
        with pytest.raises(BadInput, match="allowed: THEIRS=OURS"):
            parse_renames([item])
