"""Core attention for a spec's slot: causal, windowed layer by layer, without an S x S tensor."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.context_parallel import attend_across_ranks
from megatron_lengen.ops.attention import causal_attention


class CausalAttention(MegatronModule):
    """Softmax attention over earlier tokens; the window comes from the layer's number."""

    def __init__(
        self, config: LengenConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        windowed = config.layer_pattern()[layer_number - 1].windowed
        self.window = config.sliding_window if windowed else None
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [sq, b, heads, d], this rank's heads and, under context parallelism, tokens.
            key, value: [sk, b, groups, d].
            attention_mask, attention_bias, packed_seq_params: must be None; documents and biases
                are not available.

        Returns:
            [sq, b, heads * d].
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params:
            raise ValueError("CausalAttention takes no mask, bias or packed sequences")
        if self.config.context_parallel_size > 1:
            out = attend_across_ranks(query, key, value, self.window, self.scale)
            return out.flatten(2)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = causal_attention(q, k, v, self.window, self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)
