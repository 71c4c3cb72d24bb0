"""The package's attention inside Hugging Face models, so that long inputs need no S x S mask.

Transformers' own backends build a mask of queries times keys for every sliding-window layer. Here
the mask function answers None and the attention function gets the window as a number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_lengen.ops.attention import causal_attention

ATTENTION_NAME = "lengen"


def register_attention() -> None:
    """Make `attn_implementation="lengen"` known to transformers; repeated calls change nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """Transformers' mask function: causality and windows are left to the attention itself.

    Args:
        attention_mask: [b, keys], True where a token is real. Padding is refused, since a mask
            would be needed to hide it.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("padded batches are not available here: give rows of equal length")


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function over `causal_attention`.

    Args:
        query: [b, hq, sq, d].
        key, value: [b, hkv, sk, d]; with a cache, sk counts the cached keys too.
        attention_mask: None always, as `_no_mask` says.
        sliding_window: keys that a query sees, its own included.

    Returns:
        [b, sq, hq, d], and None where attention weights would be.
    """
    if attention_mask is not None:
        raise ValueError("a prepared attention mask is not available with this attention")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: {name} is not available here")
    if dropout or not (kwargs.get("is_causal") or getattr(module, "is_causal", True)):
        raise ValueError(f"{type(module).__name__}: only causal attention without dropout")
    output = causal_attention(query, key, value, window=sliding_window, scale=scaling)
    return output.transpose(1, 2).contiguous(), None
