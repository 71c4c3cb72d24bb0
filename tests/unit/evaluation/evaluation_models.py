"""Tiny random models for the evaluation tests."""

from __future__ import annotations

import torch

VOCAB = 160


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
