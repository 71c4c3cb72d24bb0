"""Mistral: Llama's blocks with one window on every layer, or on none."""

from __future__ import annotations

from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import AttentionKind
from megatron_lengen.convert.llama import LlamaBlocks, check_window


class Mistral(LlamaBlocks):
    """Models of transformers' `MistralForCausalLM`."""

    name = "mistral"
    architecture_class = "MistralForCausalLM"
    settable = LlamaBlocks.settable | {"sliding_window"}

    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        everywhere = all(kind.windowed for kind in config.layer_pattern())
        hf = super().hf_config(config)
        # The class has no biases and no words for them.
        del hf["attention_bias"], hf["mlp_bias"]
        return {**hf, "sliding_window": config.sliding_window if everywhere else None}

    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        check_window(hf["sliding_window"])
        shared = super().architecture({**hf, "attention_bias": False, "mlp_bias": False})
        return {**shared, "sliding_window": hf["sliding_window"]}

    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        layers = model.model.layers
        return [AttentionKind(True, layer.self_attn.config.sliding_window) for layer in layers]
