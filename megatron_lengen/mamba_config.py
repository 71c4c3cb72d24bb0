"""What a configuration says about Mamba2 blocks, and whether it can work.

Sizes, in the terms of Megatron-Core and of Dao & Gu (2024, arXiv 2405.21060): H heads of P channels
make the inner width d = H P; G groups of heads share B and C, whose state has N channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_lengen.errors import require

if TYPE_CHECKING:
    from megatron_lengen.config import LengenConfig

DECODERS = ("transformer", "mamba2")
ENTRIES = {"transformer": "pretrain_gpt.py", "mamba2": "pretrain_mamba.py"}
PROJECTION_LETTERS = ("i", "o")
# Modules of a block that can have dropout, as models.sites names them.
DROPOUT_MODULES = ("norm", "mamba_bda", "mixer.norm", "mixer.in_proj.i", "mixer.out_proj.o")
# Fields that only one kind of decoder has: no flags of the other's entry script.
MAMBA_FIELDS = (
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_heads",
    "mamba_num_groups",
    "mamba_conv_kernel",
    "mamba_chunk_size",
    "mamba_init",
    "include_mixer_norms",
)
_EXPANSION = 2  # inner width over hidden size, unless the number of heads says otherwise


class Part(NamedTuple):
    """Rows of a fused parameter that are kept apart in checkpoints."""

    name: str
    rows: int
    """Over all tensor-parallel ranks."""
    sharded: bool
    """Whether ranks hold equal shares; otherwise each holds all rows."""


@dataclass
class Mamba2Fields:
    """The fields of `LengenConfig` that describe Mamba2 blocks."""

    decoder: str = "transformer"
    """What the layers are: `transformer` or `mamba2`; the entry script says it."""

    mamba_state_dim: int = 128
    """Channels N of the state that B writes and C reads."""

    mamba_head_dim: int = 64
    """Channels P of a head."""

    mamba_num_heads: int | None = None
    """Heads H (default: twice the hidden size over --mamba-head-dim)."""

    mamba_num_groups: int = 1
    """Groups of heads that share B and C."""

    mamba_conv_kernel: int = 4
    """Taps of the causal convolution in front of the state space."""

    mamba_chunk_size: int = 256
    """Tokens that the scan of mamba-ssm computes at a time; no result depends on it."""

    mamba_init: str = "reference"
    """Initial weights: `reference` (mamba-ssm: A uniform in [1, 16], out_proj divided by the square
    root of the number of layers) or `huggingface` (A = 1 .. heads, --init-method-std 0.1)."""

    include_mixer_norms: bool = False
    """Apply the dropout variant behind the gated norm inside the mixers, too."""


def settle(config: LengenConfig) -> None:
    """Fill in what follows from the sizes, in the terms of attention that Megatron-Core asks for.

    Raises:
        BadInput: for sizes that cannot be.
    """
    require(
        config.decoder in DECODERS,
        f"decoder: found {config.decoder}; allowed: {', '.join(DECODERS)}",
    )
    if config.decoder != "mamba2":
        return
    for flag, value in (
        ("--hidden-size", config.hidden_size),
        ("--mamba-state-dim", config.mamba_state_dim),
        ("--mamba-head-dim", config.mamba_head_dim),
        ("--mamba-num-heads", config.mamba_num_heads),
        ("--mamba-num-groups", config.mamba_num_groups),
        ("--mamba-chunk-size", config.mamba_chunk_size),
    ):
        require(value is None or value >= 1, f"{flag}: found {value}; allowed: 1 or more")
    taps = config.mamba_conv_kernel
    require(taps >= 2, f"--mamba-conv-kernel: found {taps}; allowed: 2 or more")
    if config.mamba_num_heads is None:
        inner = _EXPANSION * config.hidden_size
        require(
            inner % config.mamba_head_dim == 0,
            f"--mamba-head-dim: found {config.mamba_head_dim}; allowed: divisors of the inner "
            f"width {inner} (twice --hidden-size), or give --mamba-num-heads",
        )
        config.mamba_num_heads = inner // config.mamba_head_dim
    config.num_attention_heads = config.num_query_groups = config.mamba_num_heads
    config.kv_channels = config.mamba_head_dim
    config.position_embedding_type = "none"
    config.add_bias_linear = False


def check_mamba(config: LengenConfig) -> None:
    """Raise BadInput for the first thing that is wrong; nothing for a transformer."""
    if config.decoder != "mamba2":
        return
    heads, groups = config.mamba_num_heads, config.mamba_num_groups
    tp = config.tensor_model_parallel_size
    assert heads is not None
    require(
        heads % groups == 0,
        f"--mamba-num-groups: found {groups}; allowed: divisors of the {heads} heads",
    )
    require(
        heads % tp == 0,
        f"--tensor-model-parallel-size: found {tp}; allowed: divisors of the {heads} heads "
        "(--mamba-num-heads)",
    )
    require(
        groups == 1 or groups % tp == 0,
        f"--tensor-model-parallel-size: found {tp}; allowed: divisors of --mamba-num-groups "
        f"({groups}), or one group, whose B and C every rank computes",
    )
    require(
        config.context_parallel_size == 1,
        f"--context-parallel-size: found {config.context_parallel_size}; allowed: 1, a state goes "
        "through the whole row",
    )
    require(
        config.recompute_granularity in (None, "full"),
        f"--recompute-granularity: found {config.recompute_granularity}; allowed: full (the scan "
        "keeps only its inputs as it is)",
    )
    require(
        config.mamba_init in ("reference", "huggingface"),
        f"--mamba-init: found {config.mamba_init}; allowed: reference, huggingface",
    )


def inner_size(config: LengenConfig) -> int:
    """Channels d = H P of x and z."""
    assert config.mamba_num_heads is not None
    return config.mamba_num_heads * config.mamba_head_dim


def local_groups(config: LengenConfig) -> int:
    """Groups of a tensor-parallel rank, a shared one included."""
    return max(1, config.mamba_num_groups // config.tensor_model_parallel_size)


def groups_are_shared(config: LengenConfig) -> bool:
    """Whether every tensor-parallel rank computes all of B and C."""
    return config.mamba_num_groups % config.tensor_model_parallel_size != 0


def projected_parts(config: LengenConfig) -> list[Part]:
    """Rows of the input projection, in Megatron's and Hugging Face's order."""
    assert config.mamba_num_heads is not None
    inner = Part("z", inner_size(config), True)
    return [inner, *convolved_parts(config), Part("dt", config.mamba_num_heads, True)]


def convolved_parts(config: LengenConfig) -> list[Part]:
    """Channels of the convolution."""
    state = config.mamba_num_groups * config.mamba_state_dim
    sharded = not groups_are_shared(config)
    return [
        Part("x", inner_size(config), True),
        Part("B", state, sharded),
        Part("C", state, sharded),
    ]
