"""What a family of models is; to add one, subclass `Family` and list it in `families.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.mapping import Rule, expand
from megatron_lengen.errors import require
from megatron_lengen.layers.positions import head_slopes
from megatron_lengen.layers.query_scaling import scaled_heads

# Settings of learned query scaling that its module keeps, by their names there.
SCALING_SETTINGS = (
    "coef_bound",
    "pow_bound",
    "coef_activation",
    "coef_shift",
    "log_base",
    "weight_scale",
)
_YARN = ("rotary_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LLAMA3 = ("rope_scaling_factor", "low_freq_factor", "high_freq_factor")


class AttentionKind(NamedTuple):
    """What one attention layer really does."""

    rope: bool
    window: int | None
    """Visible keys, the query's own included; None: all earlier ones."""
    slopes: tuple[float, ...] | None = None
    """ALiBi's slope of every head; None without."""
    alpha: float = 1.0
    """1 for softmax, above for entmax."""
    scaling: dict[str, Any] | None = None
    """Query scaling: its kind, which heads it scales, and its settings."""


class Family(ABC):
    """Translation of one kind of model: a table of tensor rules and a configuration map."""

    name: str
    """Hugging Face's `model_type`."""

    architecture_class: str
    """The class of its language models."""

    decoder = "transformer"
    """What our configuration calls its layers."""

    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    """Hugging Face's names of the two tables of the vocabulary."""

    settable: frozenset[str]
    """Configuration keys that `--set` may change on the way."""

    code: Path | None = None
    """The Python file that travels with a model which no class of transformers holds."""

    @abstractmethod
    def rules(self, config: LengenConfig) -> list[Rule]:
        """The tensor table; `{i}` stands for every layer."""

    @abstractmethod
    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        """Hugging Face's configuration, complete: nothing is left to defaults of a class."""

    @abstractmethod
    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        """The fields of `LengenConfig` for an effective Hugging Face configuration.

        Raises:
            BadInput: for settings that our models do not have.
        """

    @abstractmethod
    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The configuration with the user's settings and what follows from them.

        Raises:
            BadInput: for a value that cannot be.
        """

    @abstractmethod
    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        """Read off the modules of a loaded Hugging Face model, not off its configuration."""

    def prepare(self, model: Any) -> None:
        """Set a loaded Hugging Face model to compute as exactly as it can, for comparisons."""
        return None

    def objection(self, config: LengenConfig) -> str | None:
        """Why this family cannot represent the model, or None.

        Whatever the map of configurations does not bring back is an objection, so that no setting,
        also none that is added later, can be lost silently.
        """
        kept = acting_settings(config_from_architecture(self.architecture(self.hf_config(config))))
        for name, value in acting_settings(config).items():
            if kept[name] != value:
                return f"--{name.replace('_', '-')} {getattr(config, name)}"
        return None

    def check_source(self, raw: dict[str, Any], settings: dict[str, Any]) -> None:
        """Refuse a folder whose `config.json`, as written, is not of this family.

        Args:
            raw: what the file says.
            settings: the user's, from `--set`.

        Raises:
            BadInput: saying what is wrong or missing.
        """
        kind = raw.get("model_type")
        require(kind == self.name, f"--family: found {self.name}; the folder holds a {kind}")

    def in_their_terms(self, raw: dict[str, Any]) -> dict[str, Any] | None:
        """The whole configuration as Hugging Face's, for a folder in a form of somebody else's.

        None where transformers itself understands the folder.

        Raises:
            BadInput: for settings that our models do not have.
        """
        return None

    def renames(self, raw: dict[str, Any]) -> dict[str, str]:
        """Text to replace in names of tensors, for a folder in a form of somebody else's."""
        return {}

    def model_class(self, folder: Path | None = None) -> Any:
        """The class of transformers' models.

        Args:
            folder: an exported folder, whose own code (if it has any) is used.
        """
        import transformers

        return getattr(transformers, self.architecture_class)

    def config_class(self) -> Any:
        """The class of transformers' configurations; models, slow to import, are left alone."""
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[self.name]

    def apply(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """`with_settings` after refusing unknown keys."""
        unknown = sorted(set(settings) - self.settable)
        require(
            not unknown,
            f"--set: found {', '.join(unknown)}; allowed for {self.name}: "
            f"{', '.join(sorted(self.settable))}",
        )
        return self.with_settings(hf, settings) if settings else hf

    def tensor_rules(self, config: LengenConfig) -> list[Rule]:
        """The tensor table, layer by layer."""
        return expand(self.rules(config), config.num_layers)


def acting_settings(config: LengenConfig) -> dict[str, Any]:
    """The architecture's fields in a form in which models that compute the same are equal.

    Fields that do nothing are None, lists are written out by layer or head. A field that is not
    named here stays as it is.
    """
    fields = config.architecture()
    if config.decoder == "mamba2":
        # Rows that are not exported, and how weights were drawn.
        return {**fields, "make_vocab_size_divisible_by": None, "mamba_init": None}
    kinds = expected_kinds(config)
    rope, slopes = any(kind.rope for kind in kinds), head_slopes(config)
    yarn = rope and config.position_embedding_type == "yarn"
    llama3 = rope and config.use_rope_scaling
    learned = config.query_scaling == "learned"
    softplus = learned and config.query_scaling_coef_activation == "softplus_shifted"
    acts = {
        "make_vocab_size_divisible_by": False,  # rows of padding, which are not exported
        "rotary_base": rope,
        "rotary_percent": rope,
        "rotary_seq_len_interpolation_factor": rope,
        "use_rope_scaling": rope,
        **dict.fromkeys(_LLAMA3, llama3),
        **dict.fromkeys(_YARN, yarn),
        "original_max_position_embeddings": llama3 or yarn,
        "sliding_window": any(kind.window for kind in kinds),
        "nape_alibi_heads": False,  # the slopes say it
        "entmax_alpha": config.attention_function == "entmax",
        "query_scaling_proj_bias": learned,
        "query_scaling_identity_init": False,  # how weights were drawn, once
        **{f"query_scaling_{name}": learned for name in SCALING_SETTINGS},
        "query_scaling_coef_shift": softplus,
    }
    fields.update({name: None for name, does in acts.items() if not does})
    if not (rope or any(slopes)):
        fields["position_embedding_type"] = "none"
    fields["no_rope_freq"] = [not kind.rope for kind in kinds]
    fields["window_attn_skip_freq"] = [kind.window is not None for kind in kinds]
    fields["alibi_slopes"] = slopes if any(slopes) else None
    fields["query_scaling_scope"] = [scaled_heads(config, i) for i in range(config.num_layers)]
    return fields


def expected_kinds(config: LengenConfig) -> list[AttentionKind]:
    """What every attention layer of our model does."""
    if config.decoder == "mamba2":
        return []
    window = config.window_size[0] + 1 if config.window_size else None
    slopes = tuple(head_slopes(config))
    alpha = config.entmax_alpha if config.attention_function == "entmax" else 1.0
    return [
        AttentionKind(
            kind.rope,
            window if kind.windowed else None,
            slopes if any(slopes) else None,
            alpha,
            _scaling(config, layer),
        )
        for layer, kind in enumerate(config.layer_pattern())
    ]


def _scaling(config: LengenConfig, layer: int) -> dict[str, Any] | None:
    heads = tuple(scaled_heads(config, layer))
    if not any(heads):
        return None
    settings = {name: getattr(config, f"query_scaling_{name}") for name in SCALING_SETTINGS}
    return {"kind": config.query_scaling, "heads": heads, **settings}
