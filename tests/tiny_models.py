"""Small configurations, models and batches for tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengen.config import LengenConfig

VOCAB = 100
LENGTH = 24


def tiny_config(**changes: Any) -> LengenConfig:
    """Four layers of 32 features: grouped heads, a window of 8 on all but every fourth layer."""
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 16,
        "seq_length": LENGTH,
        "sliding_window": 8,
        "window_attn_skip_freq": 4,
        "no_rope_freq": 4,
        "init_method_std": 0.1,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        **changes,
    }
    return LengenConfig(**settings)


def tiny_mamba(**changes: Any) -> LengenConfig:
    """Four Mamba2 blocks of 32 features: 8 heads of 8, a state of 12, one group."""
    settings: dict[str, Any] = {
        "decoder": "mamba2",
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 1,  # a field that Megatron-Core asks for; settled by the heads
        "mamba_head_dim": 8,
        "mamba_state_dim": 12,
        "vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 16,
        "seq_length": LENGTH,
        "init_method_std": 0.1,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        **changes,
    }
    return LengenConfig(**settings)


def tiny_batch(rows: int = 2, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions, [rows, length] each."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    return text[:, :-1], text[:, 1:], torch.arange(length).expand(rows, length)
