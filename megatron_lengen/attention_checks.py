"""Whether the settings of attention can work together; called while a `LengenConfig` is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_lengen.config_checks import check_rate, parse_layers
from megatron_lengen.errors import require

if TYPE_CHECKING:
    from megatron_lengen.config import LengenConfig

CHOICES = {
    "position_embedding_type": ("rope", "yarn", "nape", "none"),
    "alibi_slopes": ("inverse", "power", "relu", "alibi"),
    "attention_function": ("softmax", "entmax"),
    "query_scaling": ("none", "learned", "log", "ssmax"),
    "query_scaling_scope": ("all", "nope"),
    "query_scaling_coef_activation": ("sigmoid", "softplus_shifted"),
    "document_boundaries": ("ignore", "mask"),
}


def check_attention(config: LengenConfig) -> None:
    """Raise BadInput for the first thing that is wrong."""
    for name, allowed in CHOICES.items():
        found = getattr(config, name)
        flag = "--" + name.replace("_", "-")
        require(found in allowed, f"{flag}: found {found}; allowed: {', '.join(allowed)}")
    _check_scaled_rope(config)
    _check_yarn(config)
    _check_nape(config)
    _check_scaling(config)
    alpha = config.entmax_alpha
    require(1 < alpha <= 2, f"--entmax-alpha: found {alpha}; allowed: above 1, up to 2")
    check_rate("--attention-dropout", config.attention_dropout)
    if config.attention_dropout_layers is not None:
        require(
            config.attention_dropout > 0, "--attention-dropout-layers: needs --attention-dropout"
        )
        parse_layers(
            config.attention_dropout_layers, config.num_layers, "--attention-dropout-layers"
        )


def _check_scaled_rope(config: LengenConfig) -> None:
    original = config.original_max_position_embeddings
    require(
        original is None or original >= 1,
        f"--original-max-position-embeddings: found {original}; allowed: 1 or more",
    )
    linear = config.rotary_seq_len_interpolation_factor
    rope = config.position_embedding_type == "rope"
    for flag, given in (
        ("--use-rope-scaling", config.use_rope_scaling),
        ("--rotary-seq-len-interpolation-factor", linear is not None),
    ):
        require(rope or not given, f"{flag}: needs --position-embedding-type rope")
    require(
        linear is None or 1 <= linear < math.inf,
        f"--rotary-seq-len-interpolation-factor: found {linear}; allowed: 1 or more",
    )
    if not config.use_rope_scaling:
        return
    require(
        linear is None,
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor: give one of them",
    )
    factor, low, high = config.rope_scaling_factor, config.low_freq_factor, config.high_freq_factor
    require(1 <= factor < math.inf, f"--rope-scaling-factor: found {factor}; allowed: 1 or more")
    require(
        0 < low < high < math.inf,
        f"--low-freq-factor and --high-freq-factor: found {low} and {high}; "
        "allowed: 0 < low < high",
    )


def _check_yarn(config: LengenConfig) -> None:
    factor, yarn = config.rotary_scaling_factor, config.position_embedding_type == "yarn"
    require(factor >= 1, f"--rotary-scaling-factor: found {factor}; allowed: 1 or more")
    require(yarn or factor == 1, "--rotary-scaling-factor: needs --position-embedding-type yarn")
    if not yarn:
        return
    require(
        config.rotary_percent == 1,
        f"--rotary-percent: found {config.rotary_percent}; allowed with yarn: 1",
    )
    require(
        0 < config.beta_slow < config.beta_fast,
        f"--beta-slow and --beta-fast: found {config.beta_slow} and {config.beta_fast}; "
        "allowed: 0 < slow < fast",
    )
    require(
        (config.mscale is None) == (config.mscale_all_dim is None),
        "--mscale and --mscale-all-dim: found one of them; give both or none",
    )


def _check_nape(config: LengenConfig) -> None:
    nape = config.position_embedding_type == "nape"
    heads = config.nape_alibi_heads
    require(nape or heads is None, "--nape-alibi-heads: needs --position-embedding-type nape")
    require(
        heads is None or 0 <= heads <= config.num_attention_heads,
        f"--nape-alibi-heads: found {heads}; allowed: 0 to --num-attention-heads "
        f"({config.num_attention_heads})",
    )


def _check_scaling(config: LengenConfig) -> None:
    coef, power = config.query_scaling_coef_bound, config.query_scaling_pow_bound
    base = config.query_scaling_log_base
    for flag, value, fits, allowed in (
        ("--query-scaling-coef-bound", coef, 1e-3 <= coef < math.inf, "1e-3 or more"),
        ("--query-scaling-pow-bound", power, 0 < power < math.inf, "above 0"),
        ("--query-scaling-log-base", base, 1 < base < math.inf, "above 1"),
    ):
        require(fits, f"{flag}: found {value}; allowed: {allowed}")
    if config.query_scaling == "none":
        return
    unpositioned = config.position_embedding_type in ("nape", "none") or config.no_rope_freq
    require(
        config.query_scaling_scope == "all" or bool(unpositioned),
        "--query-scaling-scope: found nope, but every head has positions; allowed: all, or "
        "--no-rope-freq, or --position-embedding-type nape or none",
    )
    if not config.query_scaling_identity_init or config.query_scaling_proj_bias:
        return
    first = coef / 2
    if config.query_scaling_coef_activation == "softplus_shifted":
        first = coef * math.log1p(math.exp(-config.query_scaling_coef_shift))
    require(
        config.query_scaling != "learned" or first <= 1e-3,
        f"--no-query-scaling-proj-bias: without a bias the scaling starts at 1 + {first:.3g}; "
        "allowed: --query-scaling-coef-activation softplus_shifted with a "
        "--query-scaling-coef-shift of 7 or more, or --no-query-scaling-identity-init",
    )
