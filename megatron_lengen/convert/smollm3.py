"""SmolLM3: rotary positions on most layers and none on the rest, windows on any of them.

Two traps of its configuration class: `no_rope_layers` has 1 where RoPE IS used (Megatron's
`no_rope_freq` list has 1 where it is skipped), and a missing `layer_types` puts the window on the
layers without RoPE. Both lists are therefore always written out.
"""

from __future__ import annotations

from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import AttentionKind
from megatron_lengen.convert.llama import LlamaBlocks, check_window
from megatron_lengen.errors import require

# What scales rotary positions needs some.
_NO_ROPE = {
    "position_embedding_type": "none",
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "rotary_scaling_factor": 1.0,
}
SLIDING, FULL = "sliding_attention", "full_attention"


class SmolLM3(LlamaBlocks):
    """Models of transformers' `SmolLM3ForCausalLM`."""

    name = "smollm3"
    architecture_class = "SmolLM3ForCausalLM"
    settable = LlamaBlocks.settable | {
        *("sliding_window", "use_sliding_window", "layer_types"),
        *("no_rope_layers", "no_rope_layer_interval"),
    }

    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        kinds = config.layer_pattern()
        windows = any(kind.windowed for kind in kinds)
        rope = [int(kind.rope) for kind in kinds]
        return {
            **super().hf_config(config),
            "no_rope_layers": rope,
            "no_rope_layer_interval": _interval(rope),
            "use_sliding_window": windows,
            "sliding_window": config.window_size[0] + 1 if windows else None,
            "layer_types": [SLIDING if kind.windowed else FULL for kind in kinds],
        }

    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        rope, windowed = _rope_layers(hf), _windowed_layers(hf)
        shared = super().architecture(hf)
        return {
            **shared,
            **({} if any(rope) else _NO_ROPE),
            "sliding_window": hf["sliding_window"] if any(windowed) else None,
            "window_attn_skip_freq": windowed if any(windowed) else None,
            "no_rope_freq": [1 - r for r in rope] if any(rope) else None,
        }

    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        out = super().with_settings(hf, settings)
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
    check_window(window)
    require(not on or window is not None, "sliding_window: found None; allowed: 1 or more keys")
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
