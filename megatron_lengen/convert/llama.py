"""Llama: rotary positions on every layer, no windows; and what others share with it."""

from __future__ import annotations

from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import AttentionKind, Family
from megatron_lengen.convert.mapping import Rule, direct, gate_up, grouped_qkv, vocabulary
from megatron_lengen.convert.rotary import changed_rope, rope_parameters, rotary_fields
from megatron_lengen.errors import require

_OURS, _THEIRS = "decoder.layers.{i}.", "model.layers.{i}."


class LlamaBlocks(Family):
    """Models of Llama's blocks: RMSNorm, grouped queries, a gated MLP, rotary positions."""

    settable = frozenset(
        {
            *("rope_theta", "rope_parameters", "max_position_embeddings"),
            *("rms_norm_eps", "initializer_range", "tie_word_embeddings"),
            *("bos_token_id", "eos_token_id", "pad_token_id"),
        }
    )

    def rules(self, config: LengenConfig) -> list[Rule]:
        norms = [
            direct(
                _OURS + "self_attention.linear_qkv.layer_norm_weight",
                _THEIRS + "input_layernorm.weight",
            ),
            direct(
                _OURS + "mlp.linear_fc1.layer_norm_weight",
                _THEIRS + "post_attention_layernorm.weight",
            ),
        ]
        table = [vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
        table += norms + _projections("weight")
        table += _projections("bias") if config.add_bias_linear else []
        table += [direct("decoder.final_layernorm.weight", "model.norm.weight")]
        if config.untie_embeddings_and_output_weights:
            table += [vocabulary("output_layer.weight", "lm_head.weight")]
        return table

    def objection(self, config: LengenConfig) -> str | None:
        if not config.gated_linear_unit:
            return "an MLP without gate (--swiglu is off)"
        if config.add_qkv_bias and not config.add_bias_linear:
            return "biases on query, key and value only (--add-qkv-bias)"
        return super().objection(config)

    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        rotary = rope_parameters(config)
        hf = {
            "architectures": [self.architecture_class],
            "model_type": self.name,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_query_groups,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "initializer_range": config.init_method_std,
            "rms_norm_eps": config.layernorm_epsilon,
            "attention_bias": bool(config.add_bias_linear),
            "mlp_bias": bool(config.add_bias_linear),
            "attention_dropout": 0.0,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "use_cache": True,
            "rope_theta": rotary["rope_theta"],
            "rope_parameters": rotary,
            # The class's own ids lie outside of most vocabularies.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if config.kv_channels * config.num_attention_heads != config.hidden_size:
            hf["head_dim"] = config.kv_channels
        return hf

    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        act = hf["hidden_act"]
        require(act == "silu", f"hidden_act: found {act}; allowed: silu")
        biases = (hf["attention_bias"], hf["mlp_bias"])
        require(
            biases[0] == biases[1],
            f"attention_bias, mlp_bias: found {biases[0]}, {biases[1]}; allowed: both or neither",
        )
        return {
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            "layernorm_epsilon": hf["rms_norm_eps"],
            "gated_linear_unit": True,
            "add_bias_linear": biases[0],
            "add_qkv_bias": False,
            "vocab_size": hf["vocab_size"],
            "max_position_embeddings": hf["max_position_embeddings"],
            **rotary_fields(hf["rope_parameters"]),
            "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
            "init_method_std": hf["initializer_range"],
        }

    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        rotary = changed_rope(hf, settings)
        return {**hf, **settings, "rope_theta": rotary["rope_theta"], "rope_parameters": rotary}


class Llama(LlamaBlocks):
    """Models of transformers' `LlamaForCausalLM`."""

    name = "llama"
    architecture_class = "LlamaForCausalLM"

    def objection(self, config: LengenConfig) -> str | None:
        heads = config.num_attention_heads
        if config.hidden_size % heads:
            return f"--hidden-size {config.hidden_size}, which {heads} heads do not divide"
        return super().objection(config)

    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        return [AttentionKind(rope=True, window=None) for _ in model.model.layers]


def check_window(window: Any) -> None:
    """Refuse what is neither a number of keys nor None.

    Raises:
        BadInput: naming it.
    """
    number = isinstance(window, int) and not isinstance(window, bool) and window >= 1
    require(
        number or window is None,
        f"sliding_window: found {window}; allowed: 1 or more keys, or none",
    )


def _projections(kind: str) -> list[Rule]:
    """Rules of a layer's projections, for their `weight` or `bias`."""
    attention, theirs = _OURS + "self_attention.", _THEIRS + "self_attn."
    mlp, their_mlp = _OURS + "mlp.", _THEIRS + "mlp."
    q, k, v = (f"{theirs}{letter}_proj.{kind}" for letter in "qkv")
    return [
        grouped_qkv(f"{attention}linear_qkv.{kind}", q, k, v),
        direct(f"{attention}linear_proj.{kind}", f"{theirs}o_proj.{kind}"),
        gate_up(
            f"{mlp}linear_fc1.{kind}", f"{their_mlp}gate_proj.{kind}", f"{their_mlp}up_proj.{kind}"
        ),
        direct(f"{mlp}linear_fc2.{kind}", f"{their_mlp}down_proj.{kind}"),
    ]
