"""Every check of the configuration, and what it makes of windows, layers and rates."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.config import LayerKind, LengenConfig, config_from_architecture, parse_layers
from megatron_lengen.errors import BadInput
from megatron_lengen.ops import variants

# What is set, and the flag and value that the one-line message must name.
REFUSED = [
    ({"num_layers": 0}, "--num-layers: found 0"),
    ({"hidden_size": -32}, "--hidden-size: found -32"),
    ({"hidden_size": 34}, "--hidden-size: found 34; allowed: multiples of --num-attention-heads"),
    ({"num_attention_heads": 0}, "--num-attention-heads: found 0"),
    ({"seq_length": 0}, "--seq-length: found 0"),
    ({"num_query_groups": 0}, "--num-query-groups: found 0"),
    ({"num_query_groups": 3}, "--num-attention-heads: found 4; .*--num-query-groups"),
    ({"ffn_hidden_size": 0}, "--ffn-hidden-size: found 0"),
    ({"kv_channels": 0}, "--kv-channels: found 0"),
    ({"kv_channels": 7}, "--kv-channels: found 7 .*even"),
    ({"vocab_size": -1}, "--vocab-size: found -1"),
    ({"make_vocab_size_divisible_by": 0}, "--make-vocab-size-divisible-by: found 0"),
    ({"layernorm_epsilon": 0.0}, "--norm-epsilon: found 0"),
    ({"init_method_std": -0.1}, "--init-method-std: found -0.1"),
    ({"rotary_base": 0}, "--rotary-base: found 0"),
    ({"rotary_percent": 1.5}, "--rotary-percent: found 1.5"),
    ({"max_position_embeddings": 8}, "--max-position-embeddings: found 8; .*--seq-length"),
    ({"position_embedding_type": "alibi"}, "--position-embedding-type: found alibi"),
    ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size: found 0"),
    ({"tensor_model_parallel_size": 3}, "--num-attention-heads: .*--tensor-model-parallel-size"),
    ({"tensor_model_parallel_size": 4}, "--num-query-groups: .*--tensor-model-parallel-size"),
    (
        {"tensor_model_parallel_size": 2, "ffn_hidden_size": 49},
        "--ffn-hidden-size: found 49; .*--tensor-model-parallel-size",
    ),
    (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 63},
        "--seq-length: found 63; .*--tensor-model-parallel-size",
    ),
    ({"sequence_parallel": True}, "--sequence-parallel: needs --tensor-model-parallel-size"),
    ({"pipeline_model_parallel_size": 0}, "--pipeline-model-parallel-size: found 0"),
    ({"pipeline_model_parallel_size": 3}, "--num-layers: .*--pipeline-model-parallel-size 3"),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
        "--num-layers: found 4; .*6 chunks .*x 3 virtual",
    ),
    ({"virtual_pipeline_model_parallel_size": 2}, "--num-virtual-stages-per-pipeline-rank: needs"),
    ({"virtual_pipeline_model_parallel_size": 0}, "--num-virtual-stages-per-pipeline-rank: found"),
    ({"num_layers_in_first_pipeline_stage": 2}, "--decoder-first-pipeline-num-layers: needs"),
    ({"num_layers_in_last_pipeline_stage": 0}, "--decoder-last-pipeline-num-layers: found 0"),
    (
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 1},
        r"--num-layers: found 4; .*--decoder-first-pipeline-num-layers \(1\) .*other 2 stages",
    ),
    (
        {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 4},
        "--num-layers: found 4; .*--decoder-last-pipeline-num-layers",
    ),
    (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 3,
        },
        "--recompute-num-layers: found 3; allowed: what divides the 4 layers",
    ),
    ({"context_parallel_size": 0}, "--context-parallel-size: found 0"),
    (
        {"context_parallel_size": 5},
        "--seq-length: found 24; allowed: multiples of 10 .twice --context-parallel-size",
    ),
    (
        {
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "seq_length": 30,
        },
        "--seq-length: found 30; .*--context-parallel-size and --tensor-model-parallel-size",
    ),
    ({"num_moe_experts": 4}, "--num-experts: found 4"),
    ({"no_rope_freq": 0}, "--no-rope-freq: found 0"),
    ({"no_rope_freq": [0, 1]}, "--no-rope-freq: found .* 4 layers"),
    ({"no_rope_freq": [0, 1, 2, 0]}, "--no-rope-freq: found"),
    ({"window_attn_skip_freq": -1}, "--window-attn-skip-freq: found -1"),
    ({"window_attn_skip_freq": [1]}, "--window-attn-skip-freq: found"),
    ({"sliding_window": None}, "--window-attn-skip-freq: needs --sliding-window"),
    ({"sliding_window": 0}, "--sliding-window: found 0"),
    ({"window_size": (6, 0)}, "--sliding-window and --window-size: found 8 and"),
    ({"sliding_window": None, "window_size": (7, 1)}, "--window-size: found 7,1"),
    ({"sliding_window": None, "window_size": (-1, 0)}, "--window-size: found -1,0"),
    ({"sliding_window": None, "window_size": [7]}, "--window-size: found 7;"),
    ({"dropout_variant": "gaussian"}, "--dropout-variant: found gaussian; .*vpad"),
    ({"dropout_variant": "vpad", "dropout_rate": 1.0}, "--dropout-rate: found 1.0"),
    ({"dropout_variant": "vpad", "dropout_rate": -0.1}, "--dropout-rate: found -0.1"),
    ({"dropout_variant": "vpad", "dropout_rate": 1e-6}, "--dropout-rate: found 1e-06"),
    ({"dropout_variant": "vpad", "dropout_rate": 0.999999}, "--dropout-rate: found 0.999999"),
    ({"dropout_variant": "vpad", "dropout_rate": float("nan")}, "--dropout-rate: found nan"),
    ({"dropout_variant": "vpad", "dropout_rate": float("inf")}, "--dropout-rate: found inf"),
    ({"dropout_rate": 0.1}, "--dropout-rate: found 0.1 without --dropout-variant"),
    ({"dropout_layers": "0,4"}, "--dropout-layers: found 4; allowed: layers 0 to 3"),
    ({"dropout_layers": "2-1"}, "--dropout-layers: found 2-1"),
    ({"dropout_layers": "first"}, "--dropout-layers: found 'first'"),
    ({"dropout_layers": "-1"}, "--dropout-layers: found '-1'"),
    ({"dropout_apply_to": "q,x"}, "--dropout-apply-to: found 'x'"),
    ({"dropout_apply_to": "q,,k"}, "--dropout-apply-to: found ''"),
    ({"dropout_apply_to": "g", "gated_linear_unit": False}, "--dropout-apply-to: found g"),
    ({"dropout_apply_to": "q", "dropout_variant": "pre_norm"}, "--dropout-apply-to: pre_norm"),
    ({"dropout_apply_to": "q", "dropout_variant": "residual"}, "--dropout-apply-to: residual"),
    ({"hidden_dropout": 0.1}, "--hidden-dropout: found 0.1; .*--dropout-variant pre_norm"),
    ({"attention_dropout": 1.0}, "--attention-dropout: found 1.0"),
    ({"attention_dropout_layers": "1"}, "--attention-dropout-layers: needs --attention-dropout"),
    (
        {"attention_dropout": 0.1, "attention_dropout_layers": "9"},
        "--attention-dropout-layers: found 9",
    ),
    (
        {"use_rope_scaling": True, "position_embedding_type": "nape"},
        "--use-rope-scaling: needs --position-embedding-type rope",
    ),
    ({"use_rope_scaling": True, "rope_scaling_factor": 0.5}, "--rope-scaling-factor: found 0.5"),
    (
        {"use_rope_scaling": True, "low_freq_factor": 4.0},
        "--low-freq-factor and --high-freq-factor: found 4.0 and 4.0",
    ),
    (
        {"use_rope_scaling": True, "original_max_position_embeddings": 0},
        "--original-max-position-embeddings: found 0",
    ),
    (
        {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor: give one",
    ),
    (
        {"rotary_seq_len_interpolation_factor": 2.0, "position_embedding_type": "yarn"},
        "--rotary-seq-len-interpolation-factor: needs --position-embedding-type rope",
    ),
    (
        {"rotary_seq_len_interpolation_factor": float("nan")},
        "--rotary-seq-len-interpolation-factor: found nan",
    ),
    ({"rotary_scaling_factor": 4.0}, "--rotary-scaling-factor: needs .* yarn"),
    (
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 0.5},
        "--rotary-scaling-factor: found 0.5",
    ),
    ({"position_embedding_type": "yarn", "rotary_percent": 0.5}, "--rotary-percent: found 0.5"),
    ({"position_embedding_type": "yarn", "beta_slow": 40.0}, "--beta-slow and --beta-fast"),
    ({"position_embedding_type": "yarn", "mscale": 1.0}, "--mscale and --mscale-all-dim"),
    ({"nape_alibi_heads": 2}, "--nape-alibi-heads: needs .* nape"),
    (
        {"position_embedding_type": "nape", "nape_alibi_heads": 5},
        "--nape-alibi-heads: found 5; allowed: 0 to",
    ),
    ({"alibi_slopes": "steep"}, "--alibi-slopes: found steep; allowed: inverse"),
    ({"attention_function": "sigmoid"}, "--attention-function: found sigmoid"),
    ({"entmax_alpha": 1.0}, "--entmax-alpha: found 1.0"),
    ({"query_scaling": "linear"}, "--query-scaling: found linear"),
    (
        {"query_scaling": "log", "query_scaling_scope": "nope", "no_rope_freq": None},
        "--query-scaling-scope: found nope, but every head has positions",
    ),
    ({"query_scaling_log_base": 1.0}, "--query-scaling-log-base: found 1.0"),
    ({"query_scaling_coef_bound": 0.0}, "--query-scaling-coef-bound: found 0.0"),
    (
        {"query_scaling": "learned", "query_scaling_proj_bias": False},
        "--no-query-scaling-proj-bias: without a bias the scaling starts at 1 . 0.5",
    ),
    ({"document_boundaries": "reset"}, "--document-boundaries: found reset"),
    ({"transformer_impl": "apex"}, "--transformer-impl: found apex"),
    ({"normalization": "LayerNorm"}, "--normalization: found LayerNorm"),
    ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
    ({"recompute_granularity": "half"}, "half"),
    ({"recompute_num_layers": 0}, "--recompute-num-layers: found 0"),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "--recompute-modules: found moe; allowed: core_attn, mlp, layernorm",
    ),
    ({"rotary_base": float("inf")}, "--rotary-base: found inf"),
    ({"layernorm_epsilon": float("nan")}, "--norm-epsilon: found nan"),
    ({"init_method_std": float("nan")}, "--init-method-std: found nan"),
    ({"num_layers": 4097}, "--num-layers: found 4097; allowed: up to 4096"),
    ({"seed": -1}, "--seed: found -1"),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "--recompute-modules: found layernorm",
    ),
    ({"bf16": True, "fp16": True}, "bf16"),
    (
        {"cross_entropy_fusion_impl": "fast"},
        "--cross-entropy-fusion-impl: found fast; allowed: linear, native, te, none",
    ),
    ({"cross_entropy_fusion_impl": "native"}, "--cross-entropy-fusion-impl: found native without"),
    ({"cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-impl: found te; it needs"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers: found 1"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=str)
def test_what_cannot_work_is_refused_in_one_line(monkeypatch, changes, message):
    monkeypatch.setattr("megatron_lengen.config.have_transformer_engine", lambda: False)
    with pytest.raises(BadInput, match=message) as caught:
        tiny_config(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_channels": 7, "position_embedding_type": "none"},
        {"num_attention_heads": 3, "num_query_groups": 1, "kv_channels": 10},
        {"dropout_variant": "vpad", "dropout_rate": 0.0},
        {"dropout_variant": "pre_norm", "dropout_rate": 1 / 65536},
        {"dropout_variant": "residual", "dropout_rate": 65535 / 65536},
        {"sliding_window": 1000},
        {"sliding_window": 1},
        {"max_position_embeddings": 4096},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
        {"seed": 2**32 - 1},
        {"seq_length": 1},
    ],
    ids=str,
)
def test_what_works_is_accepted(changes):
    tiny_config(**changes)


# ---- layers --------------------------------------------------------------------------------------


def pattern(layers: int = 8, **changes) -> list[tuple[int, int]]:
    config = tiny_config(num_layers=layers, **changes)
    return [(int(rope), int(windowed)) for rope, windowed in config.layer_pattern()]


def test_every_fourth_layer_without_rope_and_window():
    """Megatron's list for 8 layers is [0,0,0,1,0,0,0,1]: 1 skips RoPE."""
    expected = [(1, 1), (1, 1), (1, 1), (0, 0)] * 2
    assert pattern(no_rope_freq=4, window_attn_skip_freq=4) == expected
    listed = [0, 0, 0, 1, 0, 0, 0, 1]
    windows = [1, 1, 1, 0, 1, 1, 1, 0]  # and 1 is windowed
    assert pattern(no_rope_freq=listed, window_attn_skip_freq=windows) == expected
    assert tiny_config(num_layers=8, no_rope_freq=4).no_rope_freq == listed


def test_irregular_lists_are_kept():
    ropeless = [1, 0, 0, 0, 0, 1, 1, 0]
    windows = [0, 0, 1, 1, 0, 1, 0, 1]
    expected = [(1 - r, w) for r, w in zip(ropeless, windows, strict=True)]
    assert pattern(no_rope_freq=ropeless, window_attn_skip_freq=windows) == expected


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"no_rope_freq": None, "window_attn_skip_freq": None}, [(1, 1)] * 6),
        ({"no_rope_freq": 1, "window_attn_skip_freq": 1}, [(0, 0)] * 6),
        ({"no_rope_freq": [0] * 6, "window_attn_skip_freq": [1] * 6}, [(1, 1)] * 6),
        # Six layers are no multiple of four: the pattern simply ends.
        ({"no_rope_freq": 4}, [(1, 1), (1, 1), (1, 1), (0, 0), (1, 1), (1, 1)]),
        ({"no_rope_freq": 100}, [(1, 1), (1, 1), (1, 1), (1, 0), (1, 1), (1, 1)]),
        ({"position_embedding_type": "none"}, [(0, 1), (0, 1), (0, 1), (0, 0), (0, 1), (0, 1)]),
        (
            {"sliding_window": None, "window_attn_skip_freq": None, "no_rope_freq": 3},
            [(1, 0), (1, 0), (0, 0)] * 2,
        ),
    ],
    ids=str,
)
def test_layer_patterns(changes, expected):
    assert pattern(layers=6, **changes) == expected


def test_layer_kinds_have_names():
    assert tiny_config().layer_pattern()[0] == LayerKind(rope=True, windowed=True)


@pytest.mark.parametrize(
    "window",
    [
        {"sliding_window": 16},
        {"sliding_window": None, "window_size": (15, 0)},
        {"sliding_window": None, "window_size": [15, 0]},
    ],
    ids=str,
)
def test_the_forms_of_a_window_mean_the_same(window):
    config = tiny_config(**window)
    assert config.sliding_window == 16
    assert config.window_size == (15, 0)
    assert config.architecture()["sliding_window"] == 16


@pytest.mark.parametrize(
    "text, expected",
    [("0", {0}), ("0,3,7-11", {0, 3, 7, 8, 9, 10, 11}), (" 1 , 2-2", {1, 2}), ("3,3", {3})],
)
def test_layer_lists(text, expected):
    assert parse_layers(text, 12) == expected


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vocabulary, multiple, ranks, padded",
    [(1001, 128, 2, 1024), (1024, 128, 2, 1024), (1025, 128, 1, 1152), (1, 1, 1, 1), (7, 2, 2, 8)],
)
def test_padded_vocabulary(vocabulary, multiple, ranks, padded):
    config = tiny_config(
        vocab_size=vocabulary,
        make_vocab_size_divisible_by=multiple,
        tensor_model_parallel_size=ranks,
    )
    assert config.padded_vocab_size == padded


def test_rates_are_multiples_of_one_65536th():
    config = tiny_config(dropout_variant="vpad", dropout_rate=0.1)
    assert config.exact_dropout_rate == 6554 / 65536
    assert config.dropout_on
    assert not tiny_config(dropout_variant="vpad").dropout_on
    assert not tiny_config().dropout_on


def test_a_registered_variant_is_a_value_of_the_flag(monkeypatch):
    monkeypatch.setattr(variants, "_REGISTRY", dict(variants._REGISTRY))
    variants.register_variant("mine", placement="before_residual")(lambda m, v, p: (m, v))
    assert tiny_config(dropout_variant="mine", dropout_rate=0.1).dropout_on
    with pytest.raises(BadInput, match="--dropout-apply-to: mine acts on the sublayer outputs"):
        tiny_config(dropout_variant="mine", dropout_rate=0.1, dropout_apply_to="q")


def test_maximum_position_defaults_to_the_length():
    assert tiny_config(seq_length=48).max_position_embeddings == 48
    assert tiny_config(seq_length=48, max_position_embeddings=64).max_position_embeddings == 64


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": None, "window_attn_skip_freq": None, "no_rope_freq": [1, 0, 0, 1]}],
    ids=str,
)
def test_architecture_survives_json(changes):
    config = tiny_config(untie_embeddings_and_output_weights=True, rotary_base=5e6, **changes)
    stored = json.loads(json.dumps(config.architecture()))
    again = config_from_architecture(stored, bf16=True, seq_length=16)
    assert again.architecture() == config.architecture()
    assert again.layer_pattern() == config.layer_pattern()
    assert again.params_dtype == torch.bfloat16
    assert again.seq_length == 16


def test_unknown_settings_of_a_checkpoint_are_named():
    with pytest.raises(BadInput, match="unknown model settings colour, taste"):
        config_from_architecture({"num_layers": 1, "taste": 1, "colour": 2})


def test_every_own_field_is_documented():
    """The command line takes its help from the docstrings below the fields."""
    import ast
    import inspect

    (tree,) = ast.parse(inspect.getsource(LengenConfig)).body
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{ast.unparse(field)} has no description"
