"""The package's attention inside Hugging Face models, so that long inputs need no S x S mask.

Transformers' own backends build a mask of queries times keys for every sliding-window layer. Here
the mask function answers at most with the numbers of documents, and the attention function gets
windows, ALiBi's slopes and entmax's alpha as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.weighting import Weighting

ATTENTION_NAME = "lengen"


def register_attention() -> None:
    """Make `attn_implementation="lengen"` known to transformers; repeated calls change nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _documents_as_mask)


def _documents_as_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function: causality and windows are left to the attention itself.

    Args:
        mask_function: (row, head, query, key) -> whether the key is visible.
        attention_mask: [b, keys], True where a token is real. Padding is refused, since a mask
            would be needed to hide it.
        allow_is_causal_skip: False where `mask_function` is more than causality and a window.

    Returns:
        [b, s] int64, the number of each token's document, or None for one document a row.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("padded batches are not available here: give rows of equal length")
    if int(q_offset) + q_length != int(kv_offset) + kv_length:
        raise ValueError("caches of a fixed size are not available here")
    if use_vmap:
        raise ValueError("masks of a model's own are not available with this attention")
    if allow_is_causal_skip or q_length < 2 or mask_function is None:
        return None
    # Only documents, packed by restarting positions, hide a token from its neighbour; or a window
    # of one key, which shows no other document either.
    rows, later = torch.arange(batch_size, device=device), torch.arange(1, q_length, device=device)
    joined = mask_function(rows[:, None], torch.zeros_like(later), later, later - 1)
    return F.pad((~joined).long().cumsum(1), (1, 0)).expand(batch_size, -1)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    alibi_slopes: list[float] | None = None,
    entmax_alpha: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function over `ops.attention`.

    Args:
        query: [b, hq, sq, d].
        key, value: [b, hkv, sk, d]; with a cache, sk counts the cached keys too.
        attention_mask: documents, as `_documents_as_mask` gives them.
        sliding_window: keys that a query sees, its own included.
        alibi_slopes: slope of every head, from models of this package's own.
        entmax_alpha: 1 for softmax, from models of this package's own.

    Returns:
        [b, sq, hq, d], and None where attention weights would be.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError("a prepared attention mask is not available with this attention")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: {name} is not available here")
    if dropout or not (kwargs.get("is_causal") or getattr(module, "is_causal", True)):
        raise ValueError(f"{type(module).__name__}: only causal attention without dropout")
    slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, device=query.device)
    weighting = Weighting(
        window=sliding_window,
        scale=scaling,
        slopes=slopes,
        documents=attention_mask,
        alpha=entmax_alpha,
    )
    return attention(query, key, value, weighting).transpose(1, 2).contiguous(), None
