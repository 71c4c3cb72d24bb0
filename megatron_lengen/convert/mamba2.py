"""Mamba2, from and to Hugging Face, and from mamba-ssm's own files.

mamba-ssm's `config.json` has other names (`d_model`, `ssm_cfg`), its tensors have Hugging Face's
but for the embedding; its vocabulary is counted without the padding that its table has.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import AttentionKind, Family
from megatron_lengen.convert.mapping import Rule, direct, stacked, vocabulary
from megatron_lengen.errors import require
from megatron_lengen.mamba_config import convolved_parts, inner_size, projected_parts

_OURS, _THEIRS = "decoder.layers.{i}.mixer.", "backbone.layers.{i}.mixer."
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# One number for each head, which 16 bits would spoil.
OF_HEADS = ("A_log", "D", "dt_bias")
# What the mixers of ours have no choice of.
_FIXED = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
}
_SHORT_CHUNK = 16
_NO_LIMIT = (0.0, math.inf)
# What mamba-ssm's constructors take by default: sizes, and what has to be otherwise or so.
_SSM_SIZES = {
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "headdim": 64,
    "ngroups": 1,
    "chunk_size": 256,
}
_SSM_CHOICES = {"layer": "Mamba1", "rmsnorm": True, "norm_before_gate": False}
_SSM_ALLOWED = {**_SSM_CHOICES, "layer": "Mamba2"}


class Mamba2(Family):
    """Models of transformers' `Mamba2ForCausalLM`."""

    name = "mamba2"
    architecture_class = "Mamba2ForCausalLM"
    decoder = "mamba2"
    embedding, head = "backbone.embeddings.weight", "lm_head.weight"
    settable = frozenset(
        {"chunk_size", "layer_norm_epsilon", "initializer_range", "tie_word_embeddings", *_IDS}
    )

    def rules(self, config: LengenConfig) -> list[Rule]:
        convolved = [part.name for part in convolved_parts(config)]
        table = [
            vocabulary("embedding.word_embeddings.weight", self.embedding),
            direct(_OURS + "in_proj.layer_norm_weight", "backbone.layers.{i}.norm.weight"),
            stacked(
                [f"{_OURS}in_proj.weight.{part.name}" for part in projected_parts(config)],
                _THEIRS + "in_proj.weight",
                lambda c: [part.rows for part in projected_parts(c)],
            ),
            *(
                stacked(
                    [f"{_OURS}conv1d.{kind}.{name}" for name in convolved],
                    f"{_THEIRS}conv1d.{kind}",
                    lambda c: [part.rows for part in convolved_parts(c)],
                    taps,
                )
                for kind, taps in (("weight", lambda c: c.mamba_conv_kernel), ("bias", None))
            ),
            *(direct(_OURS + name, _THEIRS + name, fp32=True) for name in OF_HEADS),
            *(
                direct(f"{_OURS}{name}.weight", f"{_THEIRS}{name}.weight")
                for name in ("norm", "out_proj")
            ),
            direct("decoder.final_norm.weight", "backbone.norm_f.weight"),
        ]
        if config.untie_embeddings_and_output_weights:
            table.append(vocabulary("output_layer.weight", self.head))
        return table

    def objection(self, config: LengenConfig) -> str | None:
        if inner_size(config) % config.hidden_size:
            return f"an inner width of {inner_size(config)} with --hidden-size {config.hidden_size}"
        return super().objection(config)

    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        return {
            "architectures": [self.architecture_class],
            "model_type": self.name,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_heads": config.mamba_num_heads,
            "head_dim": config.mamba_head_dim,
            "state_size": config.mamba_state_dim,
            "n_groups": config.mamba_num_groups,
            "expand": inner_size(config) // config.hidden_size,
            "conv_kernel": config.mamba_conv_kernel,
            "chunk_size": config.mamba_chunk_size,
            "layer_norm_epsilon": config.layernorm_epsilon,
            "initializer_range": config.init_method_std,
            "rescale_prenorm_residual": False,
            "residual_in_fp32": True,
            "rms_norm": True,
            "time_step_min": 0.001,
            "time_step_max": 0.1,
            "time_step_floor": 1e-4,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "use_cache": True,
            **_FIXED,
            # The class's own ids lie outside of some vocabularies.
            **dict.fromkeys(_IDS),
        }

    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        for key, expected in _FIXED.items():
            require(hf[key] == expected, f"{key}: found {hf[key]}; allowed: {expected}")
        # Never written: JSON has no infinity, and the class's default is none.
        limit = tuple(hf.get("time_step_limit", _NO_LIMIT))
        require(limit == _NO_LIMIT, f"time_step_limit: found {limit}; allowed: {_NO_LIMIT}")
        return {
            "decoder": self.decoder,
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "num_attention_heads": hf["num_heads"],
            "mamba_num_heads": hf["num_heads"],
            "mamba_head_dim": hf["head_dim"],
            "mamba_state_dim": hf["state_size"],
            "mamba_num_groups": hf["n_groups"],
            "mamba_conv_kernel": hf["conv_kernel"],
            "mamba_chunk_size": hf["chunk_size"],
            "layernorm_epsilon": hf["layer_norm_epsilon"],
            "vocab_size": hf["vocab_size"],
            "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
            "init_method_std": hf["initializer_range"],
        }

    def apply(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        # With it on, transformers (5.24) divides the weights that it has just loaded.
        return {**super().apply(hf, settings), "rescale_prenorm_residual": False}

    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        return {**hf, **settings}

    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        return []

    def prepare(self, model: Any) -> None:
        # Decays are differences of sums over a chunk: where A is large, 256 tokens cost 4 digits.
        for layer in model.backbone.layers:
            layer.mixer.chunk_size = _SHORT_CHUNK

    # ---- mamba-ssm's own files ---------------------------------------------------------------

    def check_source(self, raw: dict[str, Any], settings: dict[str, Any]) -> None:
        if not is_of_mamba_ssm(raw):
            super().check_source(raw, settings)

    def renames(self, raw: dict[str, Any]) -> dict[str, str]:
        return {"backbone.embedding.": "backbone.embeddings."} if is_of_mamba_ssm(raw) else {}

    def in_their_terms(self, raw: dict[str, Any]) -> dict[str, Any] | None:
        if not is_of_mamba_ssm(raw):
            return None
        ssm = {**_SSM_SIZES, **_SSM_CHOICES, **raw["ssm_cfg"]}
        for key, allowed in _SSM_ALLOWED.items():
            require(ssm[key] == allowed, f"ssm_cfg: found {key} {ssm[key]}; allowed: {allowed}")
        unknown = sorted(set(ssm) - set(_SSM_SIZES) - set(_SSM_CHOICES))
        require(not unknown, f"ssm_cfg: found {', '.join(unknown)}; allowed: sizes of Mamba2")
        attention = raw.get("attn_layer_idx") or []
        require(not attention, f"attn_layer_idx: found {attention}; allowed: none")
        between = raw.get("d_intermediate", 0)
        require(not between, f"d_intermediate: found {between}; allowed: 0 (no MLP)")
        require(raw.get("rms_norm", True), "rms_norm: found False; allowed: True")
        multiple = raw.get("pad_vocab_size_multiple", 8)
        inner = ssm["expand"] * raw["d_model"]
        return {
            **dict.fromkeys(_IDS),
            **_FIXED,
            "architectures": [self.architecture_class],
            "model_type": self.name,
            "vocab_size": -(-raw["vocab_size"] // multiple) * multiple,
            "hidden_size": raw["d_model"],
            "num_hidden_layers": raw["n_layer"],
            "num_heads": inner // ssm["headdim"],
            "head_dim": ssm["headdim"],
            "state_size": ssm["d_state"],
            "n_groups": ssm["ngroups"],
            "expand": ssm["expand"],
            "conv_kernel": ssm["d_conv"],
            "chunk_size": ssm["chunk_size"],
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "rescale_prenorm_residual": False,
            "residual_in_fp32": raw.get("residual_in_fp32", True),
            "tie_word_embeddings": raw.get("tie_embeddings", True),
        }


def is_of_mamba_ssm(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is one that mamba-ssm wrote."""
    return "ssm_cfg" in raw and "d_model" in raw
