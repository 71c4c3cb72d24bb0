"""Random models for the tests of conversion, and a second implementation of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.config import LengenConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def random_smollm3(
    folder: Path | None = None,
    *,
    layers: int = 4,
    window: int | None = 8,
    rope: list[int] | None = None,
    windowed: list[int] | None = None,
    tied: bool = True,
    vocab_size: int = 101,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """A SmolLM3 with grouped queries and logits of the order of 1 to 10, saved to `folder`.

    Args:
        rope: 1 for layers with RoPE; every fourth layer has none by default.
        windowed: 1 for layers with the window; the layers with RoPE by default.
    """
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    rope = rope or [int((i + 1) % 4 != 0) for i in range(layers)]
    windowed = windowed or (rope if window else [0] * layers)
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        **settings,
    }
    config = SmolLM3Config(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        use_sliding_window=window is not None,
        sliding_window=window,
        no_rope_layers=rope,
        layer_types=[SLIDING if w else FULL for w in windowed],
        tie_word_embeddings=tied,
        **values,
    )
    torch.manual_seed(seed)
    model = SmolLM3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
    model = model.to(dtype).eval()
    if folder is not None:
        model.save_pretrained(folder)
    return model


def reference_logits(config: LengenConfig, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """[s] ids -> logits [s, V] in float64, written from the definitions on checkpoint keys.

    Loops over heads and builds every mask from its definition; shares no code with the package.
    """

    def weight(key: str) -> Tensor:
        return read(key).double()

    groups, heads, d = config.num_query_groups, config.num_attention_heads, config.kv_channels
    per_group = heads // groups
    table = weight("embedding.word_embeddings.weight")
    x = table[tokens]
    s = len(tokens)
    for layer, (rope, windowed) in enumerate(config.layer_pattern()):
        prefix = f"decoder.layers.{layer}."
        attention = prefix + "self_attention."
        h = _rms(x, weight(attention + "linear_qkv.layer_norm_weight"), config.layernorm_epsilon)
        qkv = h @ weight(attention + "linear_qkv.weight").T
        outputs = []
        for head in range(heads):
            base = (head // per_group) * (per_group + 2) * d
            at = base + (head % per_group) * d
            q = qkv[:, at : at + d]
            k = qkv[:, base + per_group * d : base + (per_group + 1) * d]
            v = qkv[:, base + (per_group + 1) * d : base + (per_group + 2) * d]
            if rope:
                q, k = _rotate(q, config.rotary_base), _rotate(k, config.rotary_base)
            scores = q @ k.T / math.sqrt(d)
            for i in range(s):
                first = max(0, i - config.sliding_window + 1) if windowed else 0
                scores[i, :first] = -math.inf
                scores[i, i + 1 :] = -math.inf
            outputs.append(scores.softmax(-1) @ v)
        x = x + torch.cat(outputs, -1) @ weight(attention + "linear_proj.weight").T
        h = _rms(x, weight(prefix + "mlp.linear_fc1.layer_norm_weight"), config.layernorm_epsilon)
        both = h @ weight(prefix + "mlp.linear_fc1.weight").T
        gate, up = both[:, : config.ffn_hidden_size], both[:, config.ffn_hidden_size :]
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ weight(prefix + "mlp.linear_fc2.weight").T
    x = _rms(x, weight("decoder.final_layernorm.weight"), config.layernorm_epsilon)
    untied = config.untie_embeddings_and_output_weights
    head = weight("output_layer.weight") if untied else table
    return (x @ head.T)[:, : config.vocab_size]


def _rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def _rotate(x: Tensor, base: float) -> Tensor:
    """Half-split rotary positions as multiplication of complex numbers."""
    s, d = x.shape
    half = d // 2
    angles = torch.arange(s).double()[:, None] * base ** (-torch.arange(half).double() * 2 / d)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)
