"""Tiny random models for the evaluation tests."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB = 160


class TensorSizes(TorchDispatchMode):
    """Elements of every tensor that is made while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sizes.extend(t.numel() for t in [result] if isinstance(t, torch.Tensor))
        return result


def llama(vocab: int = VOCAB, layers: int = 2, positions: int = 64):
    """A random Llama of a few thousand weights, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def smollm3(window: int = 8):
    """A random SmolLM3: layers 0 and 2 rotary with a window, layers 1 and 3 neither."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(2)
    rope = [1, 0, 1, 0]
    config = SmolLM3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        no_rope_layers=rope,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["sliding_attention" if r else "full_attention" for r in rope],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return SmolLM3ForCausalLM(config).eval()


def lengen(**settings):
    """A random model of this package's own, 2 layers: NAPE with 1 of 4 heads biased by default."""
    from megatron_lengen.convert.modeling_lengen import LengenForCausalLM, LengenModelConfig

    torch.manual_seed(3)
    values = {
        "attention_alibi_slopes": [0.5, 0.0, 0.0, 0.0],
        "no_rope_layers": [0, 0],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **settings,
    }
    config = LengenModelConfig(
        vocab_size=VOCAB,
        intermediate_size=48,
        num_hidden_layers=len(values["no_rope_layers"]),
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
        **values,
    )
    return LengenForCausalLM(config).eval()


def windowed_entmax():
    """The same with rotary positions, windows of 8 keys on the first layer, scaling and entmax."""
    return lengen(
        attention_alibi_slopes=None,
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        attention_scaling_enabled=True,
        attention_function="entmax",
    )
