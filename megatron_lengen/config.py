"""The whole description of a model, and the one place where it is checked.

`LengenConfig` extends Megatron-Core's `TransformerConfig` with the fields that Megatron-LM keeps
in its global arguments (vocabulary, positions) and with the method's own (dropout family, sliding
window). Modules read it; the command line is made from it; checkpoints store it; converters
translate it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.errors import BadInput, require

# What makes a model the model it is: stored in checkpoints and taken from them on loading.
ARCHITECTURE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "untie_embeddings_and_output_weights",
    "sliding_window",
    "window_attn_skip_freq",
    "no_rope_freq",
    "init_method_std",
)

PROJECTION_LETTERS = ("q", "k", "v", "o", "g", "u", "d")

# k / 65536 is the exact drop probability: masks compare 16-bit numbers with k.
RATE_STEPS = 1 << 16


class LayerKind(NamedTuple):
    """What one layer's attention does with positions and distance."""

    rope: bool
    windowed: bool


@dataclass
class LengenConfig(TransformerConfig):
    """Configuration of a model of this package; shapes, positions, windows and dropout."""

    hidden_dropout: float = 0.0
    """Kept at 0: dropout on the sublayer outputs is `--dropout-variant pre_norm` here."""

    attention_dropout: float = 0.0
    """Kept at 0: dropout on attention probabilities is not available."""

    transformer_impl: str = "auto"
    """Layers: `local` (PyTorch), `transformer_engine`, or `auto` (the latter where it works)."""

    cuda_graph_scope: list = field(default_factory=list)
    """Parts of a layer to capture in CUDA graphs; empty for whole layers."""

    normalization: str = "RMSNorm"
    """Normalization of every block; the dropout family is defined on RMSNorm."""

    layernorm_epsilon: float = 1e-5
    """Added to the mean square inside the square root."""

    vocab_size: int = 0
    """Number of token ids of the tokenizer (set from it unless given)."""

    make_vocab_size_divisible_by: int = 128
    """Embedding rows per tensor-parallel rank are padded to a multiple of this."""

    seq_length: int = 0
    """Tokens in a training row."""

    max_position_embeddings: int = 0
    """Longest position the model is declared for (defaults to the sequence length)."""

    position_embedding_type: str = "rope"
    """Position encoding: `rope` (rotary, half-split) or `none`."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies (Hugging Face's rope_theta)."""

    rotary_percent: float = 1.0
    """Share of each head's channels that rotate."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of the embedding's."""

    sliding_window: int | None = None
    """Window in keys, the query's own included (Hugging Face's meaning); sets window_size."""

    seed: int = 1234
    """Seed of initial weights, data order and dropout masks."""

    dropout_variant: str = "none"
    """Member of the dropout family: none, pre_norm, pre_linear, vpad, or a registered one."""

    dropout_variant_file: str | None = None
    """Python file that registers variants of your own (ops.variants.register_variant)."""

    dropout_rate: float = 0.0
    """Probability p of dropping an element; the exact rate is round(65536 p) / 65536."""

    dropout_layers: str | None = None
    """Zero-based layers that get dropout, as in 0,3,7-11 (default: all)."""

    dropout_apply_to: str | None = None
    """Put independent masks at the inputs of these projections (q,k,v,o,g,u,d) instead of one
    mask at the normalization."""

    dropout_skip_modules: str | None = None
    """Comma-separated patterns of module names that get no dropout (decoder.layers.0.*)."""

    dropout_keep_final_norm: bool = False
    """Apply the variant at the final normalization too."""

    dropout_detach_alpha: bool = True
    """Treat the scale alpha as a constant in backward."""

    dropout_detach_beta: bool = True
    """Treat the shift beta as a constant in backward."""

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_windows()
        self._check_dropout()
        self._check_unsupported()
        if self.transformer_impl == "auto":
            usable = torch.cuda.is_available() and have_transformer_engine()
            self.transformer_impl = "transformer_engine" if usable else "local"
        if self.virtual_pipeline_model_parallel_size is not None:
            # Batched messages of two chunks mix up where a pipeline has only two stages.
            self.overlap_p2p_comm, self.batch_p2p_comm = True, False
        # Weights are drawn by name after the build (models.weights); Megatron still has to mark
        # which parameters are sharded, which it does only where it initializes.
        self.init_method = self.output_layer_init_method = _leave_weights
        self.embedding_init_method = _leave_weights
        try:
            super().__post_init__()
        except (ValueError, AssertionError) as error:
            raise BadInput(" ".join(str(error).split())) from error
        if not self.max_position_embeddings:
            self.max_position_embeddings = self.seq_length

    # ---- what others ask ---------------------------------------------------------------------

    @property
    def padded_vocab_size(self) -> int:
        """Embedding rows: the vocabulary rounded up so that every rank holds equal shares."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def exact_dropout_rate(self) -> float:
        """The rate that masks really have, a multiple of 1/65536."""
        return round(RATE_STEPS * self.dropout_rate) / RATE_STEPS

    @property
    def dropout_on(self) -> bool:
        """Whether any mask is drawn in training."""
        return self.dropout_variant != "none" and self.dropout_rate > 0

    @property
    def dropout_letters(self) -> tuple[str, ...]:
        """Projections with masks of their own, empty when dropout acts at the norm."""
        return tuple(self.dropout_apply_to.split(",")) if self.dropout_apply_to else ()

    def layer_pattern(self) -> list[LayerKind]:
        """Rotary and window, layer by layer: the one truth that modules and converters use."""
        skips = _per_layer(self.no_rope_freq, self.num_layers)
        rope = self.position_embedding_type != "none"
        return [
            LayerKind(
                rope=rope and not skips[i],
                windowed=is_layer_window_attention(
                    self.window_size, self.window_attn_skip_freq, i + 1
                ),
            )
            for i in range(self.num_layers)
        ]

    def dropout_layer_set(self) -> frozenset[int]:
        """Zero-based numbers of the layers that get dropout."""
        if self.dropout_layers is None:
            return frozenset(range(self.num_layers))
        return parse_layers(self.dropout_layers, self.num_layers)

    def architecture(self) -> dict[str, Any]:
        """The fields that define the model, as plain JSON values."""
        fields = {name: getattr(self, name) for name in ARCHITECTURE_FIELDS}
        if self.sliding_window is None and self.window_size is not None:
            fields["sliding_window"] = self.window_size[0] + 1
        return fields

    # ---- checks ------------------------------------------------------------------------------

    def _check_shapes(self) -> None:
        for flag, value in (
            ("--num-layers", self.num_layers),
            ("--hidden-size", self.hidden_size),
            ("--num-attention-heads", self.num_attention_heads),
            ("--seq-length", self.seq_length),
            ("--tensor-model-parallel-size", self.tensor_model_parallel_size),
            ("--pipeline-model-parallel-size", self.pipeline_model_parallel_size),
            ("--make-vocab-size-divisible-by", self.make_vocab_size_divisible_by),
            ("--ffn-hidden-size", self.ffn_hidden_size),
            ("--num-query-groups", self.num_query_groups),
            ("--kv-channels", self.kv_channels),
        ):
            require(value is None or value >= 1, f"{flag}: found {value}; allowed: 1 or more")
        heads, tp = self.num_attention_heads, self.tensor_model_parallel_size
        if self.kv_channels is None:
            _divides("--hidden-size", self.hidden_size, "--num-attention-heads", heads)
        groups = self.num_query_groups or heads
        _divides("--num-attention-heads", heads, "--num-query-groups", groups)
        _divides("--num-attention-heads", heads, "--tensor-model-parallel-size", tp)
        require(
            groups % tp == 0,
            f"--num-query-groups: found {groups}; allowed: multiples of "
            f"--tensor-model-parallel-size ({tp})",
        )
        _divides("--hidden-size", self.hidden_size, "--tensor-model-parallel-size", tp)
        ffn = self.ffn_hidden_size or 4 * self.hidden_size
        _divides("--ffn-hidden-size", ffn, "--tensor-model-parallel-size", tp)
        if self.sequence_parallel:
            require(tp > 1, "--sequence-parallel: needs --tensor-model-parallel-size above 1")
            _divides("--seq-length", self.seq_length, "--tensor-model-parallel-size", tp)
        stages = self.pipeline_model_parallel_size
        chunks = self.virtual_pipeline_model_parallel_size or 1
        require(
            chunks == 1 or stages > 1,
            f"--num-virtual-stages-per-pipeline-rank: found {chunks}; needs "
            "--pipeline-model-parallel-size above 1",
        )
        if self.pipeline_model_parallel_layout is None and not (
            self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage
        ):
            require(
                self.num_layers % (stages * chunks) == 0,
                f"--num-layers: found {self.num_layers}; allowed: multiples of the pipeline's "
                f"{stages * chunks} chunks (--pipeline-model-parallel-size {stages}"
                + (f" x {chunks} virtual)" if chunks > 1 else ")"),
            )
        if self.max_position_embeddings and self.max_position_embeddings < self.seq_length:
            raise BadInput(
                f"--max-position-embeddings: found {self.max_position_embeddings}; allowed: "
                f"--seq-length ({self.seq_length}) or more"
            )
        require(
            self.position_embedding_type in ("rope", "none"),
            f"--position-embedding-type: found {self.position_embedding_type}; "
            "allowed: rope, none",
        )
        self._check_numbers()

    def _check_numbers(self) -> None:
        for flag, value, fits, allowed in (
            ("--vocab-size", self.vocab_size, self.vocab_size >= 0, "1 or more"),
            ("--norm-epsilon", self.layernorm_epsilon, self.layernorm_epsilon > 0, "above 0"),
            ("--init-method-std", self.init_method_std, self.init_method_std >= 0, "0 or more"),
            ("--rotary-base", self.rotary_base, self.rotary_base > 0, "above 0"),
            ("--rotary-percent", self.rotary_percent, 0 < self.rotary_percent <= 1, "(0, 1]"),
        ):
            require(fits, f"{flag}: found {value}; allowed: {allowed}")
        channels = self.kv_channels or self.hidden_size // self.num_attention_heads
        rotated = int(channels * self.rotary_percent)
        require(
            self.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0),
            f"--kv-channels: found {channels} per head, {rotated} of them rotary; "
            "allowed: an even number of rotary channels",
        )

    def _check_windows(self) -> None:
        for flag, value in (
            ("--no-rope-freq", self.no_rope_freq),
            ("--window-attn-skip-freq", self.window_attn_skip_freq),
        ):
            _check_pattern(flag, value, self.num_layers)
        # Megatron-Core accepts only a divisor here; the meaning is the same for every length.
        skips = _per_layer(self.no_rope_freq, self.num_layers)
        self.no_rope_freq = skips if any(skips) else None
        if isinstance(self.window_size, list):
            self.window_size = tuple(self.window_size)
        if self.sliding_window is not None:
            require(
                self.window_size is None,
                "--sliding-window and --window-size: found both; give one of them",
            )
            require(
                self.sliding_window >= 1,
                f"--sliding-window: found {self.sliding_window}; allowed: 1 or more keys",
            )
            self.window_size = (self.sliding_window - 1, 0)
        if self.window_size is not None:
            require(
                len(self.window_size) == 2 and self.window_size[0] >= 0 == self.window_size[1],
                f"--window-size: found {','.join(map(str, self.window_size))}; "
                "allowed: W-1,0 for a window of W keys",
            )
            self.sliding_window = self.window_size[0] + 1
        require(
            self.window_size is not None or self.window_attn_skip_freq is None,
            "--window-attn-skip-freq: needs --sliding-window",
        )

    def _check_dropout(self) -> None:
        # Imported here: the registry is arithmetic and stays importable without this module.
        from megatron_lengen.ops.variants import get_variant, load_variant_file, variant_names

        if self.dropout_variant_file is not None:
            try:
                load_variant_file(self.dropout_variant_file)
            except Exception as error:  # a file of the user's raises whatever it likes
                raise BadInput(
                    f"--dropout-variant-file: cannot use {self.dropout_variant_file} "
                    f"({type(error).__name__}: {error})"
                ) from error
        names = ("none", *variant_names())
        require(
            self.dropout_variant in names,
            f"--dropout-variant: found {self.dropout_variant}; allowed: {', '.join(names)}",
        )
        rate = self.dropout_rate
        require(
            rate == 0 or (0 < rate < 1 and 1 <= round(RATE_STEPS * rate) < RATE_STEPS),
            f"--dropout-rate: found {rate}; allowed: 0, or {1 / RATE_STEPS:.2g} up to below 1",
        )
        require(
            rate == 0 or self.dropout_variant != "none",
            f"--dropout-rate: found {rate} without --dropout-variant; "
            f"allowed variants: {', '.join(names[1:])}",
        )
        if self.dropout_layers is not None:
            parse_layers(self.dropout_layers, self.num_layers)
        for letter in self.dropout_letters:
            require(
                letter in PROJECTION_LETTERS,
                f"--dropout-apply-to: found {letter!r}; allowed: letters of "
                f"{','.join(PROJECTION_LETTERS)} separated by commas",
            )
        if self.dropout_letters:
            require(
                self.dropout_variant == "none"
                or get_variant(self.dropout_variant).placement == "after_norm",
                f"--dropout-apply-to: {self.dropout_variant} acts on the sublayer outputs, "
                "not on projections",
            )
            require(
                self.gated_linear_unit or not {"g"} & set(self.dropout_letters),
                "--dropout-apply-to: found g; there is a gate only with --swiglu",
            )
        require(
            self.hidden_dropout == 0,
            f"--hidden-dropout: found {self.hidden_dropout}; allowed: 0; dropout before the "
            "residual addition is --dropout-variant pre_norm --dropout-rate P",
        )
        require(
            self.attention_dropout == 0,
            f"--attention-dropout: found {self.attention_dropout}; allowed: 0",
        )

    def _check_unsupported(self) -> None:
        require(
            self.transformer_impl in ("auto", "local", "transformer_engine"),
            f"--transformer-impl: found {self.transformer_impl}; "
            "allowed: auto, local, transformer_engine",
        )
        require(
            self.normalization == "RMSNorm",
            f"--normalization: found {self.normalization}; allowed: RMSNorm",
        )
        require(
            not self.layernorm_zero_centered_gamma,
            "--apply-layernorm-1p: not available; gains are stored as they multiply",
        )
        require(
            self.context_parallel_size == 1,
            f"--context-parallel-size: found {self.context_parallel_size}; allowed: 1",
        )
        require(
            "layernorm" not in (self.recompute_modules or ()) or have_transformer_engine(),
            "--recompute-modules: found layernorm; recomputing norms needs Transformer Engine",
        )
        require(
            self.num_moe_experts is None,
            f"--num-experts: found {self.num_moe_experts}; mixtures of experts are not available",
        )


def _leave_weights(weight: torch.Tensor) -> None:
    """An initialization that changes nothing."""


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


def _per_layer(value: int | list[int] | None, layers: int) -> list[int]:
    """Megatron's skip pattern as a list: N marks every Nth layer, one-based."""
    if value is None:
        return [0] * layers
    if isinstance(value, int):
        return [int((i + 1) % value == 0) for i in range(layers)]
    return list(value)


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Layer numbers from `0,3,7-11` (zero-based, ranges include both ends).

    Raises:
        BadInput: for anything else, or a layer that the model does not have.
    """
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise BadInput(f"--dropout-layers: found {part!r}; allowed: numbers as in 0,3,7-11")
        first, last = int(match[1]), int(match[2] or match[1])
        require(
            first <= last < num_layers,
            f"--dropout-layers: found {part}; allowed: layers 0 to {num_layers - 1}",
        )
        layers.update(range(first, last + 1))
    return frozenset(layers)


def config_from_architecture(architecture: dict[str, Any], **settings: Any) -> LengenConfig:
    """A configuration from the fields stored in a checkpoint, with run settings on top.

    Args:
        architecture: what `LengenConfig.architecture` gave.
        settings: any other `LengenConfig` fields (parallel sizes, dtype, sequence length).
    """
    known = {f.name for f in dataclasses.fields(LengenConfig)}
    unknown = sorted(set(architecture) - known)
    require(not unknown, f"checkpoint: unknown model settings {', '.join(unknown)}")
    values = {**architecture, **settings}
    values.setdefault("seq_length", values.get("max_position_embeddings") or 1)
    if values.get("gated_linear_unit"):
        values.setdefault("activation_func", F.silu)
    if values.get("bf16"):
        values.setdefault("params_dtype", torch.bfloat16)
        values.setdefault("pipeline_dtype", torch.bfloat16)
    else:
        values.setdefault("pipeline_dtype", torch.float32)
    return LengenConfig(**values)
