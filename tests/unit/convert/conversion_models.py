"""Random models for the tests of conversion, and a second implementation of the forward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.writer import write_release

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
    return random_hf(SmolLM3ForCausalLM, config, folder, dtype, seed)


def random_hf(
    model_class: Any,
    config: Any,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """A model of transformers with such weights, saved to `folder`."""
    torch.manual_seed(seed)
    model = model_class(config)
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


def tiny_architecture(**settings: Any) -> dict[str, Any]:
    """Fields of a model of 4 layers and 4 heads of 8 channels in 2 groups, vocabulary 101."""
    return {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "vocab_size": 101,
        "max_position_embeddings": 128,
        **settings,
    }


def random_checkpoint(folder: Path, **settings: Any) -> LengenConfig:
    """A checkpoint of our model with `tiny_architecture(**settings)` and weights like the above."""
    from megatron_lengen.models.build import build_chunk
    from megatron_lengen.models.gpt_specs import KEYS_OF_FUSED_LAYERS
    from megatron_lengen.runtime import distributed

    config = config_from_architecture(tiny_architecture(**settings))
    distributed.start(config)
    parameters = dict(build_chunk(config).named_parameters())
    distributed.stop()
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, parameter in parameters.items():
        for ours, stored in KEYS_OF_FUSED_LAYERS.items():
            name = name.replace(ours, stored)
        noise = torch.randn(parameter.shape, generator=generator)
        gain = parameter.dim() == 1 and not name.endswith("bias")
        tensors[name] = 1 + 0.3 * noise if gain else (0.2 if parameter.dim() > 1 else 1) * noise
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensors[name][config.vocab_size :] = 0
    metas = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_release(folder, config, metas, tensors.__getitem__)
    return config


def reference_logits(config: LengenConfig, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """[s] ids -> logits [s, V] in float64, written from the definitions on checkpoint keys.

    Loops over heads and builds every mask from its definition; shares no code with the package.
    """
    from entmax import entmax_bisect

    @functools.cache
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
        factors = _query_factors(config, layer, rope, weight, h)
        for head in range(heads):
            base = (head // per_group) * (per_group + 2) * d
            at = base + (head % per_group) * d
            q = qkv[:, at : at + d]
            k = qkv[:, base + per_group * d : base + (per_group + 1) * d]
            v = qkv[:, base + (per_group + 1) * d : base + (per_group + 2) * d]
            q = q * factors[:, head, None]
            if rope:
                q, k = _rotate(q, config), _rotate(k, config)
            scores = q @ k.T / math.sqrt(d)
            for i in range(s):
                scores[i] -= _slopes(config)[head] * (i - torch.arange(s))
                first = max(0, i - config.sliding_window + 1) if windowed else 0
                scores[i, :first] = -math.inf
                scores[i, i + 1 :] = -math.inf
            if config.attention_function == "entmax":
                weights = entmax_bisect(scores, config.entmax_alpha, dim=-1, n_iter=60)
            else:
                weights = scores.softmax(-1)
            outputs.append(weights @ v)
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


def _rotate(x: Tensor, config: LengenConfig) -> Tensor:
    """Half-split rotary positions as multiplication of complex numbers."""
    s, d = x.shape
    half, base = d // 2, config.rotary_base
    rates = base ** (-torch.arange(half).double() * 2 / d)
    size = 1.0
    if config.rotary_seq_len_interpolation_factor is not None:
        rates = rates / config.rotary_seq_len_interpolation_factor
    if config.use_rope_scaling:
        for channel, rate in enumerate(rates.tolist()):
            length, original = 2 * math.pi / rate, config.original_max_position_embeddings
            low, high = config.low_freq_factor, config.high_freq_factor
            if length > original / low:
                rates[channel] = rate / config.rope_scaling_factor
            elif length > original / high:
                smooth = (original / length - low) / (high - low)
                slow = rate / config.rope_scaling_factor
                rates[channel] = (1 - smooth) * slow + smooth * rate
    if config.position_embedding_type == "yarn":
        factor, original = config.rotary_scaling_factor, config.original_max_position_embeddings

        def channel(turns: float) -> float:
            return d * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

        low = max(math.floor(channel(config.beta_fast)), 0)
        high = min(math.ceil(channel(config.beta_slow)), d - 1)
        stretched = ((torch.arange(half) - low) / max(high - low, 1e-3)).clamp(0, 1)
        rates = rates * (1 - stretched + stretched / factor)
        size = 0.1 * math.log(factor) + 1
    angles = torch.arange(s).double()[:, None] * rates
    turn = torch.polar(torch.full_like(angles, size), angles)
    turned = torch.complex(x[:, :half], x[:, half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def _slopes(config: LengenConfig) -> list[float]:
    """ALiBi's slopes: 1/i, or as published for 3 heads."""
    heads = config.num_attention_heads
    if config.position_embedding_type != "nape":
        return [0.0] * heads
    biased = heads // 2 if config.nape_alibi_heads is None else config.nape_alibi_heads
    if config.alibi_slopes == "alibi":
        assert biased == 3
        return [2**-4, 2**-8, 2**-2] + [0.0] * (heads - 3)
    return [1 / (i + 1) if i < biased else 0.0 for i in range(heads)]


def _query_factors(
    config: LengenConfig,
    layer: int,
    rope: bool,
    read: Callable[[str], Tensor],
    x: Tensor,
) -> Tensor:
    """[s, heads] of attention inputs [s, h], position by position."""
    prefix = f"decoder.layers.{layer}.self_attention.query_scaling."
    s, heads = len(x), config.num_attention_heads
    factors = torch.ones(s, heads, dtype=torch.float64)
    c = config
    for head in range(heads):
        no_positions = not rope and _slopes(config)[head] == 0
        if c.query_scaling == "none" or not (c.query_scaling_scope == "all" or no_positions):
            continue
        for p in range(s):
            if c.query_scaling != "learned":
                own = 1.0
                if c.query_scaling == "ssmax":
                    own = float(read(prefix + "ssmax_scale")[head])
                factors[p, head] = own * math.log(p + 1)
                continue
            z = []
            for name in ("coef", "pow"):
                product = float(read(f"{prefix}{name}_weight")[head] @ x[p])
                z.append(c.query_scaling_weight_scale * product)
                if c.query_scaling_proj_bias:
                    z[-1] += float(read(f"{prefix}{name}_bias")[head])
            coef = 1 / (1 + math.exp(-z[0]))
            if c.query_scaling_coef_activation == "softplus_shifted":
                coef = math.log1p(math.exp(z[0] - c.query_scaling_coef_shift))
            power = c.query_scaling_pow_bound * math.tanh(z[1])
            log = math.log(p + 2, c.query_scaling_log_base)
            factors[p, head] = 1 + c.query_scaling_coef_bound * coef * log**power
    return factors
