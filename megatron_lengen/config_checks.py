"""Whether a configuration can work: every check names the flag, what was found, what is allowed.

Called once, while a `LengenConfig` is made; nothing else looks at these combinations again.
"""

from __future__ import annotations

import fnmatch
import math
import re
from typing import TYPE_CHECKING

import torch

from megatron_lengen import mamba_config
from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.errors import BadInput, require
from megatron_lengen.ops.mask import MAX_LAYER, STEPS
from megatron_lengen.ops.variants import (
    get_variant,
    load_variant_file,
    row_coefficients,
    variant_names,
)

if TYPE_CHECKING:
    from megatron_lengen.config import LengenConfig

# Modules of a layer that can have dropout, as models.sites names them.
DROPOUT_MODULES = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "self_attn_bda",
    "mlp_bda",
    *(f"self_attention.linear_qkv.{letter}" for letter in "qkv"),
    "self_attention.linear_proj.o",
    *(f"mlp.linear_fc1.{letter}" for letter in "gu"),
    "mlp.linear_fc2.d",
)
_MAX_SIZE = 2**31 - 1  # kernels and index files count in 32 bits
_RECOMPUTED = ("core_attn", "mlp", "layernorm")
PROJECTION_LETTERS = ("q", "k", "v", "o", "g", "u", "d")


def check(config: LengenConfig) -> None:
    """Raise BadInput for the first thing that is wrong; settle the forms of windows and lists."""
    _check_shapes(config)
    _check_windows(config)
    _check_dropout(config)
    _check_unsupported(config)


def _check_shapes(config: LengenConfig) -> None:
    for flag, value in (
        ("--num-layers", config.num_layers),
        ("--hidden-size", config.hidden_size),
        ("--num-attention-heads", config.num_attention_heads),
        ("--seq-length", config.seq_length),
        ("--tensor-model-parallel-size", config.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", config.pipeline_model_parallel_size),
        ("--context-parallel-size", config.context_parallel_size),
        ("--num-virtual-stages-per-pipeline-rank", config.virtual_pipeline_model_parallel_size),
        ("--decoder-first-pipeline-num-layers", config.num_layers_in_first_pipeline_stage),
        ("--decoder-last-pipeline-num-layers", config.num_layers_in_last_pipeline_stage),
        ("--recompute-num-layers", config.recompute_num_layers),
        ("--make-vocab-size-divisible-by", config.make_vocab_size_divisible_by),
        ("--ffn-hidden-size", config.ffn_hidden_size),
        ("--num-query-groups", config.num_query_groups),
        ("--kv-channels", config.kv_channels),
    ):
        most = MAX_LAYER if flag == "--num-layers" else _MAX_SIZE
        require(value is None or value >= 1, f"{flag}: found {value}; allowed: 1 or more")
        require(value is None or value <= most, f"{flag}: found {value}; allowed: up to {most}")
    heads, tp = config.num_attention_heads, config.tensor_model_parallel_size
    if config.kv_channels is None:
        _divides("--hidden-size", config.hidden_size, "--num-attention-heads", heads)
    groups = config.num_query_groups or heads
    _divides("--num-attention-heads", heads, "--num-query-groups", groups)
    _divides("--num-attention-heads", heads, "--tensor-model-parallel-size", tp)
    require(
        groups % tp == 0,
        f"--num-query-groups: found {groups}; allowed: multiples of "
        f"--tensor-model-parallel-size ({tp})",
    )
    _divides("--hidden-size", config.hidden_size, "--tensor-model-parallel-size", tp)
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    _divides("--ffn-hidden-size", ffn, "--tensor-model-parallel-size", tp)
    _check_parts_of_rows(config)
    _check_stages(config)
    if config.max_position_embeddings and config.max_position_embeddings < config.seq_length:
        raise BadInput(
            f"--max-position-embeddings: found {config.max_position_embeddings}; allowed: "
            f"--seq-length ({config.seq_length}) or more"
        )
    _check_numbers(config)


def _check_stages(config: LengenConfig) -> None:
    """Every chunk of a pipeline has layers, and those not set apart have equally many."""
    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size or 1
    ends = {
        "--decoder-first-pipeline-num-layers": config.num_layers_in_first_pipeline_stage,
        "--decoder-last-pipeline-num-layers": config.num_layers_in_last_pipeline_stage,
    }
    given = {flag: layers for flag, layers in ends.items() if layers is not None}
    for flag, found in {"--num-virtual-stages-per-pipeline-rank": chunks - 1, **given}.items():
        require(not found or stages > 1, f"{flag}: needs --pipeline-model-parallel-size above 1")
    if given:
        left, others = config.num_layers - sum(given.values()), stages - len(given)
        require(
            left == 0 if others == 0 else left > 0 and left % others == 0,
            f"--num-layers: found {config.num_layers}; allowed: {' + '.join(given)} "
            f"({sum(given.values())}) and equal shares for the other {others} stages",
        )
    elif config.pipeline_model_parallel_layout is None:
        require(
            config.num_layers % (stages * chunks) == 0,
            f"--num-layers: found {config.num_layers}; allowed: multiples of the pipeline's "
            f"{stages * chunks} chunks (--pipeline-model-parallel-size {stages}"
            + (f" x {chunks} virtual)" if chunks > 1 else ")"),
        )


def _check_parts_of_rows(config: LengenConfig) -> None:
    """Context and sequence parallelism cut rows into equal parts."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    require(
        tp > 1 or not config.sequence_parallel,
        "--sequence-parallel: needs --tensor-model-parallel-size above 1",
    )
    # Each context-parallel rank holds two chunks of a row (layers.context_parallel).
    chunks = 2 if cp > 1 else 1
    multiple = cp * math.lcm(chunks, tp if config.sequence_parallel else 1)
    reasons = ["twice --context-parallel-size"] if cp > 1 else []
    reasons += ["--tensor-model-parallel-size"] if config.sequence_parallel else []
    require(
        config.seq_length % multiple == 0,
        f"--seq-length: found {config.seq_length}; allowed: multiples of {multiple} "
        f"({' and '.join(reasons)})",
    )


def _check_numbers(config: LengenConfig) -> None:
    for flag, value, fits, allowed in (
        (
            "--vocab-size",
            config.vocab_size,
            0 <= config.vocab_size <= config.padded_vocab_size <= _MAX_SIZE,
            f"1 up to {_MAX_SIZE} with its padding",
        ),
        ("--norm-epsilon", config.layernorm_epsilon, config.layernorm_epsilon > 0, "above 0"),
        ("--init-method-std", config.init_method_std, config.init_method_std >= 0, "0 or more"),
        ("--rotary-base", config.rotary_base, config.rotary_base > 0, "above 0"),
        ("--rotary-percent", config.rotary_percent, 0 < config.rotary_percent <= 1, "(0, 1]"),
        ("--seed", config.seed, 0 <= config.seed < 2**32, f"0 to {2**32 - 1}"),
    ):
        fits = fits and math.isfinite(value)
        require(fits, f"{flag}: found {value}; allowed: {allowed}")
    channels = config.kv_channels or config.hidden_size // config.num_attention_heads
    rotated = int(channels * config.rotary_percent)
    require(
        config.position_embedding_type not in ("rope", "yarn")
        or (rotated > 0 and rotated % 2 == 0),
        f"--kv-channels: found {channels} per head, {rotated} of them rotary; "
        "allowed: an even number of rotary channels",
    )


def _check_windows(config: LengenConfig) -> None:
    for flag, value in (
        ("--no-rope-freq", config.no_rope_freq),
        ("--window-attn-skip-freq", config.window_attn_skip_freq),
    ):
        _check_pattern(flag, value, config.num_layers)
    # Megatron-Core accepts only a divisor here; the meaning is the same for every length.
    skips = per_layer(config.no_rope_freq, config.num_layers)
    config.no_rope_freq = skips if any(skips) else None
    if isinstance(config.window_size, list):
        config.window_size = tuple(config.window_size)
    if config.sliding_window is not None:
        pair = (config.sliding_window - 1, 0)
        require(
            config.window_size in (None, pair),
            f"--sliding-window and --window-size: found {config.sliding_window} and "
            f"{config.window_size}; give one of them",
        )
        require(
            config.sliding_window >= 1,
            f"--sliding-window: found {config.sliding_window}; allowed: 1 or more keys",
        )
        config.window_size = pair
    if config.window_size is not None:
        require(
            len(config.window_size) == 2 and config.window_size[0] >= 0 == config.window_size[1],
            f"--window-size: found {','.join(map(str, config.window_size))}; "
            "allowed: W-1,0 for a window of W keys",
        )
        config.sliding_window = config.window_size[0] + 1
    require(
        config.window_size is not None or config.window_attn_skip_freq is None,
        "--window-attn-skip-freq: needs --sliding-window",
    )


def _check_dropout(config: LengenConfig) -> None:
    if config.dropout_variant_file is not None:
        try:
            load_variant_file(config.dropout_variant_file)
            if config.dropout_variant in variant_names():
                rows = torch.tensor([[0.0, 0.5]])
                row_coefficients(config.dropout_variant, rows, torch.ones(1, 2), 0.5)
        except Exception as error:  # a file of the user's raises whatever it likes
            raise BadInput(
                f"--dropout-variant-file: cannot use {config.dropout_variant_file} "
                f"({type(error).__name__}: {error})"
            ) from error
    names = ("none", *variant_names())
    require(
        config.dropout_variant in names,
        f"--dropout-variant: found {config.dropout_variant}; allowed: {', '.join(names)}",
    )
    rate = config.dropout_rate
    check_rate("--dropout-rate", rate)
    require(
        rate == 0 or config.dropout_variant != "none",
        f"--dropout-rate: found {rate} without --dropout-variant; "
        f"allowed variants: {', '.join(names[1:])}",
    )
    if config.dropout_layers is not None:
        parse_layers(config.dropout_layers, config.num_layers)
    _check_skipped(config)
    mamba = config.decoder == "mamba2"
    letters = mamba_config.PROJECTION_LETTERS if mamba else PROJECTION_LETTERS
    for letter in config.dropout_letters:
        require(
            letter in letters,
            f"--dropout-apply-to: found {letter!r}; allowed: letters of "
            f"{','.join(letters)} separated by commas",
        )
    after_norm = (
        config.dropout_variant != "none"
        and get_variant(config.dropout_variant).placement == "after_norm"
    )
    require(
        not config.include_mixer_norms or after_norm,
        f"--include-mixer-norms: found with --dropout-variant {config.dropout_variant}; allowed: "
        "with variants that act behind norms",
    )
    if config.dropout_letters:
        require(
            config.dropout_variant == "none" or after_norm,
            f"--dropout-apply-to: {config.dropout_variant} acts on the sublayer outputs, "
            "not on projections",
        )
        require(
            config.gated_linear_unit or not {"g"} & set(config.dropout_letters),
            "--dropout-apply-to: found g; there is a gate only with --swiglu",
        )
    require(
        config.hidden_dropout == 0,
        f"--hidden-dropout: found {config.hidden_dropout}; allowed: 0; dropout before the "
        "residual addition is --dropout-variant pre_norm --dropout-rate P",
    )


def _check_skipped(config: LengenConfig) -> None:
    """Every pattern of --dropout-skip-modules meets a module that could have dropout."""
    if config.dropout_skip_modules is None:
        return
    mamba = config.decoder == "mamba2"
    modules = mamba_config.DROPOUT_MODULES if mamba else DROPOUT_MODULES
    names = [f"decoder.layers.{i}.{module}" for i in range(config.num_layers) for module in modules]
    names.append("decoder.final_norm" if mamba else "decoder.final_layernorm")
    for pattern in config.dropout_skip_modules.split(","):
        require(
            bool(fnmatch.filter(names, pattern.strip())),
            f"--dropout-skip-modules: {pattern.strip()!r} matches no module; allowed: patterns of "
            f"names such as {names[0]}",
        )


def _check_unsupported(config: LengenConfig) -> None:
    require(
        config.transformer_impl in ("auto", "local", "transformer_engine"),
        f"--transformer-impl: found {config.transformer_impl}; "
        "allowed: auto, local, transformer_engine",
    )
    require(
        config.normalization == "RMSNorm",
        f"--normalization: found {config.normalization}; allowed: RMSNorm",
    )
    require(
        not config.layernorm_zero_centered_gamma,
        "--apply-layernorm-1p: not available; gains are stored as they multiply",
    )
    _check_loss(config)
    for module in config.recompute_modules or ():
        require(
            module in _RECOMPUTED,
            f"--recompute-modules: found {module}; allowed: {', '.join(_RECOMPUTED)}",
        )
    chunks = config.pipeline_model_parallel_size * (
        config.virtual_pipeline_model_parallel_size or 1
    )
    at_once, layers = config.recompute_num_layers or 1, config.num_layers // chunks
    require(
        config.recompute_method != "uniform" or layers % at_once == 0,
        f"--recompute-num-layers: found {at_once}; allowed: what divides the {layers} layers of a "
        "pipeline chunk",
    )
    require(
        "layernorm" not in (config.recompute_modules or ()) or have_transformer_engine(),
        "--recompute-modules: found layernorm; recomputing norms needs Transformer Engine",
    )
    require(
        config.num_moe_experts is None,
        f"--num-experts: found {config.num_moe_experts}; mixtures of experts are not available",
    )


def _check_loss(config: LengenConfig) -> None:
    found, allowed = config.cross_entropy_fusion_impl, ("linear", "native", "te", "none")
    require(
        found in allowed,
        f"--cross-entropy-fusion-impl: found {found}; allowed: {', '.join(allowed)}",
    )
    require(
        found != "native" or config.bf16,
        "--cross-entropy-fusion-impl: found native without --bf16; it rounds gradients to bf16; "
        "allowed without: linear, none",
    )
    require(
        found != "te" or (have_transformer_engine() and torch.cuda.is_available()),
        "--cross-entropy-fusion-impl: found te; it needs Transformer Engine and a GPU; allowed "
        "without: linear, none, with --bf16 native",
    )
    require(
        not config.mtp_num_layers,
        f"--mtp-num-layers: found {config.mtp_num_layers}; multi-token prediction is not available",
    )


def check_rate(flag: str, rate: float) -> None:
    """A probability of dropping that masks can have."""
    require(
        rate == 0 or (0 < rate < 1 and 1 <= round(STEPS * rate) < STEPS),
        f"{flag}: found {rate}; allowed: 0, or {1 / STEPS:.2g} up to below 1",
    )


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    require(value % by == 0, f"{name}: found {value}; allowed: multiples of {by_name} ({by})")


def _check_pattern(flag: str, value: int | list[int] | None, layers: int) -> None:
    if isinstance(value, int):
        require(value >= 1, f"{flag}: found {value}; allowed: 1 or more")
    elif value is not None:
        require(
            len(value) == layers and set(value) <= {0, 1},
            f"{flag}: found {value}; allowed: a number, or one 0 or 1 for each of the "
            f"{layers} layers",
        )


def per_layer(value: int | list[int] | None, layers: int) -> list[int]:
    """Megatron's skip pattern as a list: N marks every Nth layer, one-based."""
    if value is None:
        return [0] * layers
    if isinstance(value, int):
        return [int((i + 1) % value == 0) for i in range(layers)]
    return list(value)


def parse_layers(text: str, num_layers: int, flag: str = "--dropout-layers") -> frozenset[int]:
    """Layer numbers from `0,3,7-11` (zero-based, ranges include both ends).

    Raises:
        BadInput: for anything else, or a layer that the model does not have.
    """
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise BadInput(f"{flag}: found {part!r}; allowed: numbers as in 0,3,7-11")
        first, last = int(match[1]), int(match[2] or match[1])
        require(
            first <= last < num_layers,
            f"{flag}: found {part}; allowed: layers 0 to {num_layers - 1}, ranges from low to high",
        )
        layers.update(range(first, last + 1))
    return frozenset(layers)
