"""Core attention of Transformer Engine's spec: its kernels where they serve the layer's weighting.

It serves causal softmax with windows, and documents where flash-attn is installed: the rows of a
batch one behind the other, cut where documents end (`thd`, `cu_seqlens`). ALiBi's slopes, entmax,
dropout of weights (whose mask is a function of coordinates here) and whatever else
`ops.attention_choice` names go to the next backend, without Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import require
from megatron_lengen.layers.attention import CausalAttention
from megatron_lengen.ops.attention_choice import choose_aloud, request_of
from megatron_lengen.ops.weighting import Weighting

# Where the documents of micro-batches in flight end, by the tensor that announced them: counting
# waits for the device, which must not happen in every layer.
_PACKED: Any = WeakTensorKeyDictionary()


class TEAttention(CausalAttention):
    """`CausalAttention` with Transformer Engine as its first backend."""

    def __init__(
        self,
        config: LengenConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(config, layer_number, softmax_scale)
        self.te = None
        if self.alpha == 1:
            self.te = te_dot_product_attention()(
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                attention_dropout=0.0,
                softmax_scale=softmax_scale,
                cp_comm_type=messages_for(config, layer_number, self.window, cp_comm_type),
                **others,
            )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        request = request_of(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            weighting,
            te=True,
            context_parallel=self.config.context_parallel_size > 1,
        )
        if choose_aloud(request) != "te":
            return super()._attend(query, key, value, weighting)
        assert self.te is not None
        if weighting.documents is None:
            return self.te(query, key, value, None, AttnMaskType.causal)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        packed = packed_documents(weighting.documents)
        output = self.te(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed)
        rows = output.reshape(query.shape[1], query.shape[0], -1)
        return rows.transpose(0, 1).contiguous()


def packed_documents(documents: Tensor) -> PackedSeqParams:
    """Where documents end in the rows of a batch laid one behind the other.

    Counted once for each tensor, however many layers ask.

    Args:
        documents: [b, s] int64, number of each token's document in its row, never falling.

    Returns:
        `cu_seqlens` [documents + 1] int32, 0 and the end of every document, and the longest one.
    """
    found = _PACKED.get(documents)
    if found is None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        ends = torch.cat((starts, starts.new_tensor([documents.numel()])))
        longest = int(ends.diff().max())
        cumulative = ends.to(torch.int32)
        found = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        _PACKED[documents] = found
    return found


def te_dot_product_attention() -> Any:
    """Megatron-Core's wrapper of Transformer Engine's attention; a class."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def messages_for(
    config: LengenConfig, layer_number: int, window: int | None, given: str | None
) -> str:
    """How context-parallel ranks exchange keys in Transformer Engine (`cp_comm_type`) of a layer.

    Its ring of messages (`p2p`, the default without windows) knows no windows; gathering keys does,
    and asks nothing of the number of heads.

    Raises:
        BadInput: for a ring where there is a window.
    """
    windowed = window is not None and config.context_parallel_size > 1
    require(
        not (windowed and given is not None and "p2p" in given),
        f"cp_comm_type: found {given} in layer {layer_number}, which has a window; "
        "allowed: all_gather, a2a",
    )
    return given or ("all_gather" if windowed else "p2p")
