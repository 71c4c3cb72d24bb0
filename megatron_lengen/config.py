"""The whole description of a model; `config_checks` decides whether it can work.

`LengenConfig` extends Megatron-Core's `TransformerConfig` with the fields that Megatron-LM keeps
in its global arguments (vocabulary, positions) and with the method's own (dropout family, sliding
window). Modules read it; the command line is made from it; checkpoints store it; converters
translate it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_lengen.attention_checks import check_attention
from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.config_checks import check, parse_layers, per_layer
from megatron_lengen.config_fields import ARCHITECTURE_FIELDS, MAMBA_ARCHITECTURE_FIELDS
from megatron_lengen.errors import BadInput, require
from megatron_lengen.fp8_checks import check_fp8
from megatron_lengen.mamba_config import Mamba2Fields, check_mamba, settle
from megatron_lengen.ops.mask import STEPS


class LayerKind(NamedTuple):
    """What one layer's attention does with positions and distance."""

    rope: bool
    windowed: bool


@dataclass
class LengenConfig(Mamba2Fields, TransformerConfig):
    """Configuration of a model of this package; shapes, positions, windows and dropout."""

    hidden_dropout: float = 0.0
    """Kept at 0: dropout on the sublayer outputs is `--dropout-variant pre_norm` here."""

    attention_dropout: float = 0.0
    """Probability of dropping an attention weight; masks are functions of their coordinates."""

    attention_dropout_layers: str | None = None
    """Zero-based layers that get attention dropout, as in 0,3,7-11 (default: all)."""

    transformer_impl: str = "auto"
    """Layers: `local` (PyTorch), `transformer_engine`, or `auto` (the latter where it works)."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Compute the layers' projections in fp8 (Transformer Engine): e4m3 everywhere, or `hybrid`,
    e5m2 for gradients."""

    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """Scaling of fp8: `delayed` by earlier maxima; `tensorwise` by the tensor at hand; `blockwise`
    by blocks of 128 (Hopper and later); `mxfp8` by blocks of 32 (Blackwell)."""

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
    """Position encoding: `rope` (rotary, half-split), `yarn` (rotary, stretched), `nape` (ALiBi on
    some heads, nothing on the others) or `none`."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies (Hugging Face's rope_theta)."""

    rotary_percent: float = 1.0
    """Share of each head's channels that rotate."""

    use_rope_scaling: bool = False
    """Slow the lower rotary frequencies down as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """Llama 3.1's scaling: what the lowest frequencies are divided by."""

    low_freq_factor: float = 1.0
    """Llama 3.1's scaling: turns within the original positions below which a channel is slowed
    by the whole factor."""

    high_freq_factor: float = 4.0
    """Llama 3.1's scaling: turns within the original positions above which a channel is left
    alone."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Divide all rotary angles by this (Hugging Face's `linear` scaling)."""

    rotary_scaling_factor: float = 1.0
    """YaRN: how many times longer than --original-max-position-embeddings rows may be."""

    original_max_position_embeddings: int | None = None
    """YaRN and Llama 3.1's scaling: positions before stretching (default:
    --max-position-embeddings with YaRN, 8192 with --use-rope-scaling)."""

    beta_fast: float = 32.0
    """YaRN: rotations within the original positions above which a channel is left alone."""

    beta_slow: float = 1.0
    """YaRN: rotations below which a channel is stretched by the whole factor."""

    mscale: float | None = None
    """YaRN: numerator of the factor on cosines and sines, with --mscale-all-dim its denominator
    (default: 0.1 ln(factor) + 1)."""

    mscale_all_dim: float | None = None
    """YaRN: see --mscale."""

    nape_alibi_heads: int | None = None
    """NAPE: heads with ALiBi's bias, the first ones (default: half of the heads, rounded down)."""

    alibi_slopes: str = "inverse"
    """NAPE: slopes of the A heads with ALiBi's bias: `inverse` 1/i; `power` 2^(-8i/A); `relu`
    1 - (i-1)/A; `alibi` as published, also for A that is no power of two."""

    attention_function: str = "softmax"
    """What turns scores into weights: `softmax` or `entmax`, which gives exact zeros."""

    entmax_alpha: float = 1.5
    """Alpha of entmax: above 1, where it comes close to softmax, up to 2 (sparsemax)."""

    query_scaling: str = "none"
    """Factor of the queries: `none`; `learned` 1 + coef(x) log(p + 2)^pow(x) by head; `log`
    ln(p + 1); `ssmax` s ln(p + 1) with a learned s of each head."""

    query_scaling_scope: str = "all"
    """What is scaled: `all`, or only heads without positions: `nope` (layers without rotary
    positions; of NAPE the heads without ALiBi's bias)."""

    query_scaling_coef_bound: float = 1.0
    """Learned scaling: factor of the coefficient's activation."""

    query_scaling_pow_bound: float = 2.0
    """Learned scaling: pow is this times tanh(z)."""

    query_scaling_coef_activation: str = "sigmoid"
    """Learned scaling: `sigmoid` coef = bound sigmoid(z), or `softplus_shifted` coef = bound
    softplus(z - shift)."""

    query_scaling_coef_shift: float = 8.0
    """Learned scaling: shift of softplus_shifted."""

    query_scaling_log_base: float = 2.0
    """Learned scaling: base of log(p + 2)."""

    query_scaling_proj_bias: bool = True
    """Learned scaling: give both projections a bias."""

    query_scaling_identity_init: bool = True
    """Learned scaling: start within 1e-3 of no scaling; otherwise draw the projections like any."""

    query_scaling_weight_scale: float = 1.0
    """Learned scaling: factor of the projections' products W x."""

    document_boundaries: str = "ignore"
    """What attention does at the end of a document in a row: `ignore`, or `mask`: nothing crosses
    it and positions restart."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of the embedding's."""

    sliding_window: int | None = None
    """Window in keys, the query's own included (Hugging Face's meaning); sets window_size. One
    that no row exceeds is full attention."""

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
        settle(self)
        check_mamba(self)
        check(self)
        check_attention(self)
        if self.transformer_impl == "auto":
            usable = torch.cuda.is_available() and have_transformer_engine()
            self.transformer_impl = "transformer_engine" if usable else "local"
        check_fp8(self)
        if self.virtual_pipeline_model_parallel_size is not None:
            # Batched messages of two chunks mix up where a pipeline has only two stages.
            self.overlap_p2p_comm, self.batch_p2p_comm = True, False
        # Weights are drawn by name after the build (models.weights); Megatron still has to mark
        # which parameters are sharded, which it does only where it initializes.
        self.init_method = self.output_layer_init_method = _leave_weights
        self.embedding_init_method = _leave_weights
        if self.position_embedding_type == "yarn":
            self._set_yarn()
        elif self.use_rope_scaling and self.original_max_position_embeddings is None:
            self.original_max_position_embeddings = 8192  # Megatron-LM's
        try:
            super().__post_init__()
        except (ValueError, AssertionError) as error:
            raise BadInput(" ".join(str(error).split())) from error
        if not self.max_position_embeddings:
            self.max_position_embeddings = self.seq_length

    def _set_yarn(self) -> None:
        """Megatron-Core reads YaRN's settings from attributes that its dataclass does not have."""
        if self.original_max_position_embeddings is None:
            self.original_max_position_embeddings = self.max_position_embeddings or self.seq_length
        self.yarn_rotary_scaling_factor = self.rotary_scaling_factor
        self.yarn_original_max_position_embeddings = self.original_max_position_embeddings
        self.yarn_beta_fast, self.yarn_beta_slow = self.beta_fast, self.beta_slow
        self.yarn_mscale, self.yarn_mscale_all_dim = self.mscale, self.mscale_all_dim
        self.yarn_correction_range_round_to_int = True

    # ---- what others ask ---------------------------------------------------------------------

    @property
    def padded_vocab_size(self) -> int:
        """Embedding rows: the vocabulary rounded up so that every rank holds equal shares."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def exact_dropout_rate(self) -> float:
        """The rate that masks really have, a multiple of 1/65536."""
        return round(STEPS * self.dropout_rate) / STEPS

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
        skips = per_layer(self.no_rope_freq, self.num_layers)
        rope = self.position_embedding_type in ("rope", "yarn")
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
        return self._layer_set(self.dropout_layers, "--dropout-layers")

    def attention_dropout_layer_set(self) -> frozenset[int]:
        """Zero-based numbers of the layers whose attention weights are dropped."""
        if self.attention_dropout == 0:
            return frozenset()
        return self._layer_set(self.attention_dropout_layers, "--attention-dropout-layers")

    def _layer_set(self, text: str | None, flag: str) -> frozenset[int]:
        if text is None:
            return frozenset(range(self.num_layers))
        return parse_layers(text, self.num_layers, flag)

    def architecture(self) -> dict[str, Any]:
        """The fields that define the model, as plain JSON values."""
        mamba = self.decoder == "mamba2"
        names = MAMBA_ARCHITECTURE_FIELDS if mamba else ARCHITECTURE_FIELDS
        fields = {name: getattr(self, name) for name in names}
        if not mamba and self.sliding_window is None and self.window_size is not None:
            fields["sliding_window"] = self.window_size[0] + 1
        return fields


def _leave_weights(weight: torch.Tensor) -> None:
    """An initialization that changes nothing."""


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
