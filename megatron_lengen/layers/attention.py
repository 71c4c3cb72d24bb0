"""Core attention for a spec's slot: everything between queries, keys, values and the output.

Windows, documents, ALiBi's bias, entmax and dropout of the weights, by layer, without an S x S
tensor; which of them act follows from the configuration and the layer's number.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.context_parallel import attend_across_ranks
from megatron_lengen.layers.coordinates import current_documents, current_samples
from megatron_lengen.layers.dropout import DropoutSite
from megatron_lengen.layers.positions import head_slopes
from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.constants import constant
from megatron_lengen.ops.weighting import WeightDropout, Weighting


class CausalAttention(MegatronModule):
    """Attention over earlier tokens. `site` is set after the build where weights are dropped."""

    def __init__(
        self, config: LengenConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        windowed = config.layer_pattern()[layer_number - 1].windowed
        self.window = config.sliding_window if windowed else None
        self.scale = softmax_scale
        self.alpha = config.entmax_alpha if config.attention_function == "entmax" else 1.0
        self.slopes = tuple(head_slopes(config))
        self.site: DropoutSite | None = None

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
            attention_mask, attention_bias, packed_seq_params: must be None; documents come from
                `coordinates.set_documents`, biases from the configuration.

        Returns:
            [sq, b, heads * d].
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params:
            raise ValueError("CausalAttention takes no mask, bias or packed sequences")
        return self._attend(query, key, value, self._weighting(query))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """[sq, b, heads * d] of the inputs of `forward`."""
        if self.config.context_parallel_size > 1:
            return attend_across_ranks(query, key, value, weighting).flatten(2)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attention(q, k, v, weighting).permute(2, 0, 1, 3).flatten(2)

    def _weighting(self, query: Tensor) -> Weighting:
        heads = query.shape[2]
        first = heads * parallel_state.get_tensor_model_parallel_rank()
        slopes = self.slopes[first : first + heads]
        dropout = None
        if self.training and self.site is not None:
            dropout = WeightDropout(
                rate=self.site.rate,
                seed=self.site.seed,
                samples=current_samples(),
                layer=self.site.layer,
                site=self.site.site,
                first_head=first,
            )
        return Weighting(
            window=self.window,
            scale=self.scale,
            slopes=constant(slopes, torch.float32, query.device) if any(slopes) else None,
            documents=current_documents(),
            alpha=self.alpha,
            dropout=dropout,
        )
