"""Settings of fp8 that cannot work are refused in one line that names the flag."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_config, tiny_mamba

from megatron_lengen.errors import BadInput
from megatron_lengen.fp8_checks import RECIPES, check_fp8_tokens
from megatron_lengen.training import arguments
from megatron_lengen.training.deepspeed_config import check_features
from megatron_lengen.training.flags import FP8, all_flags

TE = {
    "transformer_impl": "transformer_engine",
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}
ON = {**TE, "fp8": "hybrid"}
CURRENT = {**ON, "fp8_recipe": "tensorwise"}
MASKED = {"dropout_variant": "vpad", "dropout_rate": 0.1, "dropout_apply_to": "q"}

REFUSED = [
    # without fp8
    ({"fp8_recipe": "mxfp8"}, "--fp8-recipe: needs --fp8-format"),
    ({"fp8_margin": 1}, "--fp8-margin: needs --fp8-format"),
    ({"fp8_amax_history_len": 16}, "--fp8-amax-history-len: needs --fp8-format"),
    ({"fp8_amax_compute_algo": "max"}, "--fp8-amax-compute-algo: needs --fp8-format"),
    ({"first_last_layers_bf16": True}, "--first-last-layers-bf16: needs --fp8-format"),
    ({"num_layers_at_end_in_bf16": 2}, "--num-layers-at-end-in-bf16: needs --first-last-layers"),
    # what it needs
    ({**ON, "bf16": False}, "--fp8-format: needs --bf16"),
    (
        {**ON, "transformer_impl": "local"},
        "--fp8-format: found with --transformer-impl local; allowed: transformer_engine",
    ),
    ({**ON, **MASKED}, "--fp8-format: not with --dropout-apply-to"),
    # choices and numbers
    ({**TE, "fp8": "e5m2"}, "--fp8-format: found e5m2; allowed: e4m3, hybrid"),
    (
        {**ON, "fp8_recipe": "custom"},
        "--fp8-recipe: found custom; allowed: delayed, tensorwise, blockwise, mxfp8",
    ),
    ({**ON, "fp8_amax_history_len": 0}, "--fp8-amax-history-len: found 0; allowed: 1 or more"),
    ({**ON, "fp8_margin": -1}, "--fp8-margin: found -1; allowed: 0 or more"),
    ({**CURRENT, "fp8_margin": 1}, "--fp8-margin: found with --fp8-recipe tensorwise"),
    (
        {**ON, "first_last_layers_bf16": True},
        "--first-last-layers-bf16: found with --fp8-recipe delayed; allowed: tensorwise, ",
    ),
    (
        {**CURRENT, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 5},
        "--num-layers-at-start-in-bf16: found 5; allowed: 0 to 4",
    ),
    (
        {
            **ON,
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm"],
        },
        "--recompute-modules: found layernorm with --fp8-recipe delayed",
    ),
    # sizes: 4 heads, 2 groups, 32 features unless said otherwise
    ({**ON, "hidden_size": 40, "kv_channels": 8}, "--hidden-size: found 40 .*multiples of 16"),
    ({**ON, "ffn_hidden_size": 40}, "--ffn-hidden-size: found 40 on a rank"),
    ({**ON, "tensor_model_parallel_size": 2}, "--ffn-hidden-size: found 24 on a rank"),
    ({**ON, "fp8_recipe": "mxfp8"}, "--ffn-hidden-size: found 48 .*mxfp8: multiples of 32"),
    ({**ON, "kv_channels": 10}, "--num-attention-heads: found 40 channels"),
    (
        {**ON, "num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 4},
        "--num-query-groups: found 24 channels",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=str)
def test_refused_in_one_line(monkeypatch, changes, message):
    monkeypatch.setattr("megatron_lengen.config_checks.have_transformer_engine", lambda: True)
    with pytest.raises(BadInput, match=message) as caught:
        tiny_config(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        ON,
        {**ON, "fp8": "e4m3", "fp8_margin": 2, "fp8_amax_history_len": 1024},
        {**ON, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 8},
        {**ON, "tensor_model_parallel_size": 2, "ffn_hidden_size": 64},
        {**ON, **MASKED, "dropout_rate": 0.0},
        {**CURRENT, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 4},
        {**ON, "fp8_recipe": "mxfp8", "ffn_hidden_size": 64},
    ],
    ids=str,
)
def test_what_works_is_accepted(changes):
    tiny_config(**changes)


def test_mamba2_has_no_fp8():
    with pytest.raises(BadInput, match="--fp8-format: not available for mamba2 blocks"):
        tiny_mamba(**ON)


@pytest.mark.parametrize(
    "recipe, changes, rows, fits",
    [
        ("delayed", {}, 2, True),
        ("delayed", {}, 1, False),
        ("mxfp8", {}, 2, False),
        ("mxfp8", {}, 4, True),
        ("tensorwise", {"context_parallel_size": 2}, 2, False),
        ("tensorwise", {"context_parallel_size": 2}, 4, True),
        ("tensorwise", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2, False),
        ("tensorwise", {"tensor_model_parallel_size": 2}, 2, True),
    ],
)
def test_tokens_of_a_rank(recipe, changes, rows, fits):
    """Rows of 24 tokens."""
    config = tiny_config(**{**ON, "fp8_recipe": recipe, "ffn_hidden_size": 64, **changes})
    if fits:
        check_fp8_tokens(config, rows)
        return
    with pytest.raises(BadInput, match=f"--seq-length: found 24, .*of {RECIPES[recipe]} such"):
        check_fp8_tokens(config, rows)


def test_flags_are_megatron_lms():
    names = {flag.name for flag in all_flags() if flag.field in FP8}
    assert names == {
        "--fp8-format",
        "--fp8-recipe",
        "--fp8-margin",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
        "--first-last-layers-bf16",
        "--num-layers-at-start-in-bf16",
        "--num-layers-at-end-in-bf16",
    }


COMMAND = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 "
    "--transformer-impl transformer_engine --fp8-format hybrid --train-iters 1 --lr 1e-3 "
)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--mock-data", "--transformer-impl: found transformer_engine, which cannot be imported"),
        ("--mock-data --seq-length 20", "--seq-length: found 20, which is 20 tokens"),
        ("--mock-data --fp8-recipe custom", "--fp8-recipe: found custom; allowed: delayed, "),
        ("--mock-data --fp8-format e5m2", "--fp8-format: found e5m2; allowed: e4m3, hybrid"),
        (
            "--mock-data --save here --rerun-mode validate_results",
            "--rerun-mode validate_results: found with --fp8-recipe delayed",
        ),
        (
            "--copy-task 4-8 --eval-generation 8",
            "--eval-generation: not with --fp8-format",
        ),
    ],
)
def test_command_lines(monkeypatch, flags, message):
    monkeypatch.setattr(arguments, "have_transformer_engine", lambda: False)
    if "--mock-data" in flags:
        flags += " --tokenizer-type NullTokenizer --vocab-size 100"
    with pytest.raises(BadInput, match=message) as caught:
        arguments.parse_settings((COMMAND + flags).split(), "test")
    assert "\n" not in str(caught.value)


def test_deepspeed_has_no_fp8():
    others = SimpleNamespace(
        rerun_mode="disabled",
        use_distributed_optimizer=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    check_features(others, tiny_config(**TE), others, others)
    with pytest.raises(BadInput, match="--fp8-format: not with --engine deepspeed"):
        check_features(others, tiny_config(**ON), others, others)


def test_mambas_script_points_to_the_other():
    with pytest.raises(BadInput, match="--fp8-format: unrecognized; it is a flag of pretrain_gpt"):
        arguments.parse_settings(["--fp8-format", "hybrid"], "test", "mamba2")
