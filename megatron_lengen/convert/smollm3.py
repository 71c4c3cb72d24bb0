"""SmolLM3: rotary positions on most layers and none on the rest, windows on any of them.

Two traps of its configuration class: `no_rope_layers` has 1 where RoPE IS used (Megatron's
`no_rope_freq` list has 1 where it is skipped), and a missing `layer_types` puts the window on the
layers without RoPE. Both lists are therefore always written out.
"""

from __future__ import annotations

from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import AttentionKind, Family
from megatron_lengen.convert.mapping import Rule, direct, gate_up, grouped_qkv, vocabulary
from megatron_lengen.errors import require

SLIDING, FULL = "sliding_attention", "full_attention"

_OURS, _THEIRS = "decoder.layers.{i}.", "model.layers.{i}."


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


class SmolLM3(Family):
    """Models of transformers' `SmolLM3ForCausalLM`."""

    name = "smollm3"
    settable = frozenset(
        {
            *("sliding_window", "use_sliding_window", "layer_types"),
            *("no_rope_layers", "no_rope_layer_interval", "rope_theta", "max_position_embeddings"),
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
        if config.rotary_percent != 1.0:
            return f"--rotary-percent {config.rotary_percent}"
        return None

    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        kinds = config.layer_pattern()
        windows = any(kind.windowed for kind in kinds)
        rope = [int(kind.rope) for kind in kinds]
        theta = float(config.rotary_base)
        hf = {
            "architectures": ["SmolLM3ForCausalLM"],
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
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "no_rope_layers": rope,
            "no_rope_layer_interval": _interval(rope),
            "use_sliding_window": windows,
            "sliding_window": config.window_size[0] + 1 if windows else None,
            "layer_types": [SLIDING if kind.windowed else FULL for kind in kinds],
            # The class's own ids lie outside of most vocabularies.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if config.kv_channels * config.num_attention_heads != config.hidden_size:
            hf["head_dim"] = config.kv_channels
        return hf

    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
        rope = _rope_layers(hf)
        windowed = _windowed_layers(hf)
        rotary = hf["rope_parameters"]
        kind = rotary.get("rope_type", "default")
        require(kind == "default", f"rope_parameters: found rope_type {kind}; allowed: default")
        part = rotary.get("partial_rotary_factor") or 1.0
        require(part == 1.0, f"partial_rotary_factor: found {part}; allowed: 1")
        act = hf["hidden_act"]
        require(act == "silu", f"hidden_act: found {act}; allowed: silu")
        biases = (hf["attention_bias"], hf["mlp_bias"])
        require(
            biases[0] == biases[1],
            f"attention_bias, mlp_bias: found {biases[0]}, {biases[1]}; allowed: both or neither",
        )
        return {
            "num_layers": layers,
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
            "layernorm_epsilon": hf["rms_norm_eps"],
            "gated_linear_unit": True,
            "add_bias_linear": biases[0],
            "add_qkv_bias": False,
            "vocab_size": hf["vocab_size"],
            "max_position_embeddings": hf["max_position_embeddings"],
            "position_embedding_type": "rope" if any(rope) else "none",
            "rotary_base": rotary["rope_theta"],
            "rotary_percent": 1.0,
            "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
            "sliding_window": hf["sliding_window"] if any(windowed) else None,
            "window_attn_skip_freq": windowed if any(windowed) else None,
            "no_rope_freq": [1 - r for r in rope] if any(rope) else None,
            "init_method_std": hf["initializer_range"],
        }

    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        out = {**hf, **settings}
        if "rope_theta" in settings:
            theta = settings["rope_theta"]
            number = isinstance(theta, int | float) and not isinstance(theta, bool) and theta > 0
            require(number, f"--set rope_theta: found {theta}; allowed: a number above 0")
            out["rope_theta"] = float(theta)
            out["rope_parameters"] = {**hf["rope_parameters"], "rope_theta": float(theta)}
        if "no_rope_layer_interval" in settings and "no_rope_layers" not in settings:
            every, layers = settings["no_rope_layer_interval"], hf["num_hidden_layers"]
            require(
                isinstance(every, int) and every >= 1,
                f"--set no_rope_layer_interval: found {every}; allowed: 1 or more",
            )
            out["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
        rope = _rope_layers(out)
        out["no_rope_layers"], out["no_rope_layer_interval"] = rope, _interval(rope)
        if {"sliding_window", "use_sliding_window"} & set(settings):
            _set_window(out, settings, rope)
        _windowed_layers(out)
        return out

    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        kinds = []
        for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
            attention = layer.self_attn
            # Eager and SDPA take the mask from layer_types, flash attention from the module.
            by_mask = model.config.sliding_window if kind == SLIDING else None
            window = attention.sliding_window
            require(window == by_mask, f"config.json: windows {window} and {by_mask} disagree")
            kinds.append(AttentionKind(bool(attention.use_rope), window))
        return kinds


def _set_window(out: dict[str, Any], settings: dict[str, Any], rope: list[int]) -> None:
    """A window given by the user goes on the RoPE layers, unless `layer_types` is given too."""
    window = out["sliding_window"]
    on = settings.get("use_sliding_window", window is not None)
    require(isinstance(on, bool), f"--set use_sliding_window: found {on}; allowed: true, false")
    require(
        not on or (isinstance(window, int) and not isinstance(window, bool) and window >= 1),
        f"--set sliding_window: found {window}; allowed: 1 or more keys, or none",
    )
    out["use_sliding_window"], out["sliding_window"] = on, window if on else None
    if "layer_types" not in settings:
        out["layer_types"] = [SLIDING if on and r else FULL for r in rope]


def _rope_layers(hf: dict[str, Any]) -> list[int]:
    """One 0 or 1 for each layer, 1 where RoPE is used."""
    layers, rope = hf["num_hidden_layers"], hf["no_rope_layers"]
    require(
        isinstance(rope, list) and len(rope) >= layers and {0, 1} >= set(rope),
        f"no_rope_layers: found {rope}; allowed: a 0 or 1 for each of the {layers} layers",
    )
    return [int(r) for r in rope[:layers]]


def _windowed_layers(hf: dict[str, Any]) -> list[int]:
    """One 0 or 1 for each layer, 1 where the window is on.

    Raises:
        BadInput: where attention implementations would differ on it.
    """
    types, window = hf["layer_types"], hf["sliding_window"]
    layers = hf["num_hidden_layers"]
    require(
        isinstance(types, list) and len(types) == layers and {SLIDING, FULL} >= set(types),
        f"layer_types: found {types}; allowed: {SLIDING} or {FULL} for each of {layers} layers",
    )
    windowed = [int(kind == SLIDING) for kind in types]
    require(
        not any(windowed) or (hf["use_sliding_window"] and window is not None),
        f"layer_types: found {SLIDING} with use_sliding_window {hf['use_sliding_window']} and "
        f"sliding_window {window}; give --set sliding_window=W, or none",
    )
    return windowed


def _interval(rope: list[int]) -> int:
    """The interval that says the same as the list; the number of layers + 1 where none does."""
    layers = len(rope)
    for every in range(1, layers + 2):
        if rope == [int((i + 1) % every != 0) for i in range(layers)]:
            return every
    return layers + 1
