"""The command line: made from the dataclasses, named as Megatron-LM names things."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from runs import MODEL, RUN, cpu_seconds, settings_of

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput
from megatron_lengen.training.flags import RENAMED, SERVED, all_flags, build_parser
from megatron_lengen.training.settings import TrainingSettings

ROOT = Path(__file__).parents[3]
PRETRAIN = ROOT / "pretrain_gpt.py"
# GPU graphs are not offered; the entry script says what the decoder is.
WITHOUT_FLAG = {"cuda_graph_scope", "decoder"}
# A flag that only one of the entry scripts has, for each kind of reason.
OF_ATTENTION = {"--num-attention-heads", "--swiglu", "--sliding-window", "--attention-dropout"}
OF_MAMBA = {"--mamba-state-dim", "--mamba-num-groups", "--mamba-init", "--include-mixer-norms"}

# Flags of Megatron-LM, as its users write them, and the field each sets here.
MEGATRON_LM = {
    "--fp8-format hybrid": ("fp8", "hybrid"),
    "--fp8-recipe mxfp8": ("fp8_recipe", "mxfp8"),
    "--fp8-margin 1": ("fp8_margin", 1),
    "--fp8-amax-history-len 16": ("fp8_amax_history_len", 16),
    "--fp8-amax-compute-algo max": ("fp8_amax_compute_algo", "max"),
    "--first-last-layers-bf16": ("first_last_layers_bf16", True),
    "--num-layers-at-start-in-bf16 2": ("num_layers_at_start_in_bf16", 2),
    "--num-layers-at-end-in-bf16 2": ("num_layers_at_end_in_bf16", 2),
    "--fp8-param-gather": None,
    "--num-layers 4": ("num_layers", 4),
    "--hidden-size 8": ("hidden_size", 8),
    "--ffn-hidden-size 8": ("ffn_hidden_size", 8),
    "--num-attention-heads 2": ("num_attention_heads", 2),
    "--num-query-groups 2": ("num_query_groups", 2),
    "--kv-channels 4": ("kv_channels", 4),
    "--seq-length 16": ("seq_length", 16),
    "--max-position-embeddings 16": ("max_position_embeddings", 16),
    "--swiglu": ("gated_linear_unit", True),
    "--disable-bias-linear": ("add_bias_linear", False),
    "--add-qkv-bias": ("add_qkv_bias", True),
    "--norm-epsilon 1e-6": ("layernorm_epsilon", 1e-6),
    "--normalization RMSNorm": ("normalization", "RMSNorm"),
    "--position-embedding-type rope": ("position_embedding_type", "rope"),
    "--rotary-base 5000": ("rotary_base", 5000.0),
    "--rotary-percent 0.5": ("rotary_percent", 0.5),
    "--untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
    "--make-vocab-size-divisible-by 8": ("make_vocab_size_divisible_by", 8),
    "--vocab-size 99": ("vocab_size", 99),
    "--init-method-std 0.02": ("init_method_std", 0.02),
    "--attention-dropout 0": ("attention_dropout", 0.0),
    "--hidden-dropout 0": ("hidden_dropout", 0.0),
    "--window-size 15,0": ("window_size", [15, 0]),
    "--transformer-impl local": ("transformer_impl", "local"),
    "--tensor-model-parallel-size 2": ("tensor_model_parallel_size", 2),
    "--pipeline-model-parallel-size 2": ("pipeline_model_parallel_size", 2),
    "--num-virtual-stages-per-pipeline-rank 2": ("virtual_pipeline_model_parallel_size", 2),
    "--decoder-first-pipeline-num-layers 1": ("num_layers_in_first_pipeline_stage", 1),
    "--decoder-last-pipeline-num-layers 1": ("num_layers_in_last_pipeline_stage", 1),
    "--context-parallel-size 1": ("context_parallel_size", 1),
    "--sequence-parallel": ("sequence_parallel", True),
    "--use-distributed-optimizer": ("use_distributed_optimizer", True),
    "--overlap-grad-reduce": ("overlap_grad_reduce", True),
    "--overlap-param-gather": ("overlap_param_gather", True),
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "--recompute-granularity full": ("recompute_granularity", "full"),
    "--recompute-method uniform": ("recompute_method", "uniform"),
    "--recompute-num-layers 1": ("recompute_num_layers", 1),
    "--recompute-modules core_attn mlp": ("recompute_modules", ["core_attn", "mlp"]),
    "--bf16": ("bf16", True),
    "--seed 1": ("seed", 1),
    "--lr 1e-3": ("lr", 1e-3),
    "--min-lr 1e-4": ("min_lr", 1e-4),
    "--weight-decay 0.1": ("weight_decay", 0.1),
    "--adam-beta1 0.9": ("adam_beta1", 0.9),
    "--adam-beta2 0.95": ("adam_beta2", 0.95),
    "--adam-eps 1e-8": ("adam_eps", 1e-8),
    "--clip-grad 1.0": ("clip_grad", 1.0),
    "--lr-decay-style WSD": ("lr_decay_style", "WSD"),
    "--lr-wsd-decay-style linear": ("lr_wsd_decay_style", "linear"),
    "--lr-wsd-decay-iters 5": ("lr_wsd_decay_iters", 5),
    "--lr-decay-iters 5": ("lr_decay_iters", 5),
    "--lr-warmup-iters 5": ("lr_warmup_iters", 5),
    "--lr-warmup-fraction 0.1": ("lr_warmup_fraction", 0.1),
    "--lr-warmup-init 0": ("lr_warmup_init", 0.0),
    "--override-opt_param-scheduler": None,  # spelled wrongly: must be refused
    "--override-opt-param-scheduler": ("override_opt_param_scheduler", True),
    "--use-checkpoint-opt-param-scheduler": ("use_checkpoint_opt_param_scheduler", True),
    "--train-iters 5": ("train_iters", 5),
    "--micro-batch-size 5": ("micro_batch_size", 5),
    "--global-batch-size 5": ("global_batch_size", 5),
    "--data-path 0.3 a 0.7 b": ("data_path", ["0.3", "a", "0.7", "b"]),
    "--train-data-path a": ("train_data_path", ["a"]),
    "--valid-data-path a": ("valid_data_path", ["a"]),
    "--split 98,2,0": ("split", "98,2,0"),
    "--data-cache-path a": ("data_cache_path", "a"),
    "--mock-data": ("mock_data", True),
    "--num-workers 0": ("num_workers", 0),
    "--eod-mask-loss": ("eod_mask_loss", True),
    "--tokenizer-type NullTokenizer": ("tokenizer_type", "NullTokenizer"),
    "--tokenizer-model a": ("tokenizer_model", "a"),
    "--eval-interval 5": ("eval_interval", 5),
    "--eval-iters 5": ("eval_iters", 5),
    "--log-interval 5": ("log_interval", 5),
    "--save a": ("save", "a"),
    "--load a": ("load", "a"),
    "--ckpt-step 5": ("ckpt_step", 5),
    "--save-interval 5": ("save_interval", 5),
    "--no-save-optim": ("no_save_optim", True),
    "--no-load-optim": ("no_load_optim", True),
    "--finetune": ("finetune", True),
    "--exit-interval 5": ("exit_interval", 5),
    "--exit-duration-in-mins 5": ("exit_duration_in_mins", 5.0),
    "--tensorboard-dir a": ("tensorboard_dir", "a"),
    "--wandb-project a": ("wandb_project", "a"),
    "--wandb-exp-name a": ("wandb_exp_name", "a"),
    "--wandb-save-dir a": ("wandb_save_dir", "a"),
    "--distributed-timeout-minutes 5": ("distributed_timeout_minutes", 5.0),
}


def parse(text: str) -> dict[str, object]:
    return vars(build_parser("test").parse_args(text.split()))


@pytest.mark.parametrize("text", MEGATRON_LM)
def test_megatron_lms_flags_set_the_field(text):
    expected = MEGATRON_LM[text]
    if expected is None:
        with pytest.raises(BadInput, match="unrecognized"):
            parse(text)
    else:
        assert parse(text) == {expected[0]: expected[1]}


def test_every_field_of_ours_has_a_flag_and_every_flag_a_field():
    ours = {
        name
        for cls in (*LengenConfig.__mro__, *TrainingSettings.__mro__)
        if cls.__module__.startswith("megatron_lengen.")
        for name in vars(cls).get("__annotations__", ())
    }
    flagged = {flag.field for flag in all_flags()}
    assert ours - flagged == WITHOUT_FLAG
    assert flagged == (ours - WITHOUT_FLAG) | SERVED
    assert len({flag.name for flag in all_flags()}) == len(all_flags())
    assert set(RENAMED) <= flagged


def test_flags_keep_the_fields_names_but_for_the_table():
    for flag in all_flags():
        spelled = "--" + flag.field.replace("_", "-")
        if flag.field in RENAMED:
            assert flag.name == RENAMED[flag.field] != spelled
        elif flag.turns_off:
            assert flag.name == spelled.replace("--", "--no-", 1)
        else:
            assert flag.name == spelled


@pytest.mark.parametrize(
    "text, field",
    [
        ("--disable-bias-linear", "add_bias_linear"),
        ("--dropout-no-detach-alpha", "dropout_detach_alpha"),
        ("--dropout-no-detach-beta", "dropout_detach_beta"),
        ("--no-decay-embeddings", "decay_embeddings"),
    ],
)
def test_switches_that_turn_off(text, field):
    default = {
        f.name: f.default for c in (LengenConfig, TrainingSettings) for f in dataclasses.fields(c)
    }[field]
    assert default is True
    assert parse(text) == {field: False}


@pytest.mark.parametrize("flag", ["--no-rope-freq", "--window-attn-skip-freq"])
@pytest.mark.parametrize(
    "text, value",
    [
        ("4", 4),
        ("0,0,0,1", [0, 0, 0, 1]),
        ("[0,0,0,1]", [0, 0, 0, 1]),
        ("[0,0,0,1]*3", [0, 0, 0, 1] * 3),
        ("[1]*4", [1, 1, 1, 1]),
        ("[1]", [1]),
    ],
)
def test_layer_patterns(flag, text, value):
    assert list(parse(f"{flag} {text}").values()) == [value]


@pytest.mark.parametrize("text", ["four", "[0,1", "0,1;import os", "2**9", "([0]*3)+[1]"])
def test_other_patterns_are_refused(text):
    if text == "[0,1":  # an open bracket reads as the list it starts
        assert parse(f"--no-rope-freq {text}") == {"no_rope_freq": [0, 1]}
        return
    with pytest.raises(BadInput, match="--no-rope-freq"):
        parse(f"--no-rope-freq {text}")


@pytest.mark.parametrize(
    "text, names",
    [
        ("--num-layers four", "--num-layers"),
        ("--lr fast", "--lr"),
        ("--lr-decay-style step", "--lr-decay-style"),
        ("--num-layer 4", "--num-layer"),
        ("--lr", "--lr"),
    ],
)
def test_what_argparse_refuses_is_one_line(text, names):
    with pytest.raises(BadInput, match=names) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_help_is_quick_and_explains_every_flag():
    words = {}
    for entry in ("pretrain_gpt.py", "pretrain_mamba.py"):
        before = cpu_seconds()
        done = subprocess.run(
            [sys.executable, ROOT / entry, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert cpu_seconds() - before < 10
        words[entry] = " ".join(done.stdout.split())
    everything = " ".join(words.values())
    for flag in all_flags():
        assert flag.help, flag.name
        start_of_help = " ".join(flag.help.split())[:25]
        assert f"{flag.name} " in everything and start_of_help in everything, flag.name
    for flags, home, other in (
        (OF_ATTENTION, "pretrain_gpt.py", "pretrain_mamba.py"),
        (OF_MAMBA, "pretrain_mamba.py", "pretrain_gpt.py"),
    ):
        for name in flags:
            assert f"{name} " in words[home] and f"{name} " not in words[other], name


def test_a_flag_of_the_other_script_is_said_to_be_that():
    for decoder, flag, home in (
        ("transformer", "--mamba-state-dim", "pretrain_mamba.py"),
        ("mamba2", "--sliding-window", "pretrain_gpt.py"),
    ):
        with pytest.raises(BadInput, match=f"{flag}: unrecognized; it is a flag of {home}"):
            build_parser("test", decoder).parse_args([flag, "8"])


def test_the_length_of_rows_is_asked_for():
    with pytest.raises(BadInput, match="--seq-length: not given; allowed: tokens of a training"):
        settings_of(base=f"{MODEL.replace('--seq-length 24', '')} {RUN}")
