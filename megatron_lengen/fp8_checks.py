"""Whether fp8 can work with a model's settings; called while a `LengenConfig` is made.

Sizes follow from what Transformer Engine 2.20 asserts: inputs and weights of a product in fp8 have
a last dimension that divides by 16 and the others together by 8 (`assert_dim_for_fp8_exec`), and
each of them is the last one of some product of forward or backward; MXFP8 scales blocks of 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lengen.errors import require

if TYPE_CHECKING:
    from megatron_lengen.config import LengenConfig

# What every dimension of a product must be a multiple of.
RECIPES = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
FORMATS = ("e4m3", "hybrid")
_NEEDS_FORMAT = {
    "fp8_recipe": "delayed",
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "first_last_layers_bf16": False,
}
_DELAYED_ONLY = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def check_fp8(config: LengenConfig) -> None:
    """Raise BadInput for the first thing that is wrong.

    `transformer_impl` must be settled.
    """
    given = {name for name, off in _NEEDS_FORMAT.items() if getattr(config, name) != off}
    for name in _ENDS:
        require(
            getattr(config, name) == 1 or config.first_last_layers_bf16,
            f"{_flag(name)}: needs --first-last-layers-bf16",
        )
    if config.fp8 is None:
        for name in _NEEDS_FORMAT:
            require(name not in given, f"{_flag(name)}: needs --fp8-format")
        return
    _check_choices(config)
    _check_model(config)
    for name in _DELAYED_ONLY:
        require(
            name not in given or config.fp8_recipe == "delayed",
            f"{_flag(name)}: found with --fp8-recipe {config.fp8_recipe}; allowed: delayed",
        )
    _check_ends(config)
    _check_sizes(config)


def check_fp8_tokens(config: LengenConfig, micro_batch_size: int) -> None:
    """Raise BadInput where the tokens of a micro-batch are no multiple of what fp8 needs."""
    if config.fp8 is None:
        return
    multiple = RECIPES[config.fp8_recipe]
    parts = config.context_parallel_size
    if config.sequence_parallel:
        parts *= config.tensor_model_parallel_size
    tokens = micro_batch_size * config.seq_length // parts
    require(
        tokens % multiple == 0,
        f"--seq-length: found {config.seq_length}, which is {tokens} tokens of a micro-batch on a "
        f"rank; allowed with --fp8-recipe {config.fp8_recipe}: multiples of {multiple} such tokens",
    )


def _check_choices(config: LengenConfig) -> None:
    for flag, found, allowed in (
        ("--fp8-format", config.fp8, FORMATS),
        ("--fp8-recipe", config.fp8_recipe, tuple(RECIPES)),
        ("--fp8-amax-compute-algo", config.fp8_amax_compute_algo, ("most_recent", "max")),
    ):
        require(found in allowed, f"{flag}: found {found}; allowed: {', '.join(allowed)}")
    length, margin = config.fp8_amax_history_len, config.fp8_margin
    require(length >= 1, f"--fp8-amax-history-len: found {length}; allowed: 1 or more")
    require(margin >= 0, f"--fp8-margin: found {margin}; allowed: 0 or more")


def _check_model(config: LengenConfig) -> None:
    require(config.bf16, "--fp8-format: needs --bf16")
    require(
        config.transformer_impl == "transformer_engine",
        f"--fp8-format: found with --transformer-impl {config.transformer_impl}; allowed: "
        "transformer_engine",
    )
    require(
        config.decoder == "transformer",
        f"--fp8-format: not available for {config.decoder} blocks",
    )
    require(
        not (config.dropout_on and config.dropout_letters),
        "--fp8-format: not with --dropout-apply-to, whose projections are not Transformer Engine's "
        "and would stay in bf16; allowed: the mask at the norm (no --dropout-apply-to)",
    )
    require(
        config.fp8_recipe != "delayed" or "layernorm" not in (config.recompute_modules or ()),
        "--recompute-modules: found layernorm with --fp8-recipe delayed; allowed: another recipe",
    )


def _check_ends(config: LengenConfig) -> None:
    if not config.first_last_layers_bf16:
        return
    require(
        config.fp8_recipe != "delayed",
        "--first-last-layers-bf16: found with --fp8-recipe delayed; allowed: "
        + ", ".join(name for name in RECIPES if name != "delayed"),
    )
    most = config.num_layers // config.pipeline_model_parallel_size
    for name in _ENDS:
        found = getattr(config, name)
        require(
            0 <= found <= most,
            f"{_flag(name)}: found {found}; allowed: 0 to {most}, the layers of a pipeline stage",
        )


def _check_sizes(config: LengenConfig) -> None:
    """Rows and columns of every projection on a rank."""
    multiple, tp = RECIPES[config.fp8_recipe], config.tensor_model_parallel_size
    heads = config.num_attention_heads
    channels = config.kv_channels or config.hidden_size // heads
    queries = heads * channels
    fused = queries + 2 * (config.num_query_groups or heads) * channels
    for flag, what, size in (
        ("--hidden-size", "", config.hidden_size),
        ("--ffn-hidden-size", "on a rank ", (config.ffn_hidden_size or 4 * config.hidden_size)),
        ("--num-attention-heads", "channels of a rank's heads ", queries),
        ("--num-query-groups", "channels of a rank's queries, keys and values ", fused),
    ):
        here = size // tp if what else size
        require(
            here % multiple == 0,
            f"{flag}: found {here} {what}with --fp8-format; allowed with --fp8-recipe "
            f"{config.fp8_recipe}: multiples of {multiple}",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
