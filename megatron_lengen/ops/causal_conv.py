"""Mamba's short convolution: depthwise, causal, with an activation behind it.

Shapes: b rows, l tokens, d channels, w taps; channels come last, as projections leave them. The
state is what the next token needs of those before it: their w - 1 last inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each channel's own causal convolution over the tokens.

    Args:
        x: [b, l, d].
        weight: [d, w]; its last column is the tap of a token's own input.
        bias: [d] or None.
        activation: "silu" or None.
        seq_idx: int [b, l], the document of each token, or None; no tap reaches into another one.
        initial_state: [b, d, w - 1], the inputs before the first token, of the same document; zeros
            by default.
        return_final_state: whether the last w - 1 inputs are returned, too.

    Returns:
        y [b, l, d] in x's dtype, or (y, state [b, d, w - 1]).

    Raises:
        ValueError: for shapes that do not fit each other, or another activation.
    """
    _check(x, weight, bias, activation, seq_idx, initial_state)
    taps = weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    if initial_state is None:
        before = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    else:
        before = initial_state.transpose(1, 2).to(x.dtype)
    padded = torch.cat((before, x), dim=1)
    documents = None
    if seq_idx is not None:
        changes = F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).int().cumsum(1), (taps, 0))[:, :, None]
        documents = changes[:, : padded.shape[1]] if seq_idx.shape[1] else None
    length = x.shape[1]
    values = padded.to(wide)
    y = None
    for tap in range(taps):
        term = values[:, tap : tap + length] * weight[:, tap].to(wide)
        if documents is not None:
            term = term * (documents[:, tap : tap + length] == documents[:, taps - 1 :])
        y = term if y is None else y + term
    assert y is not None
    if bias is not None:
        y = y + bias.to(wide)
    y = (F.silu(y) if activation else y).to(x.dtype)
    if not return_final_state:
        return y
    last = padded[:, length:]
    if documents is not None:  # the next token sees nothing of the documents before its own
        last = last * (documents[:, length:] == documents[:, -1:])
    return y, last.transpose(1, 2)


def conv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """The convolution's next token.

    Args:
        x: [b, d].
        state: [b, d, w - 1]; it is not changed.
        weight, bias, activation: as in `causal_conv1d`.

    Returns:
        y [b, d] in x's dtype, and the new state.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    window = torch.cat((state.to(x.dtype), x[..., None]), dim=2)
    y = (window.to(wide) * weight.to(wide)).sum(2)
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activation else y).to(x.dtype), window[:, :, 1:]


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f"x of {list(x.shape)} and taps of {list(weight.shape)}")
    b, length, d = x.shape
    wanted = {
        "weight": (weight, (d, weight.shape[1])),
        "bias": (bias, (d,)),
        "seq_idx": (seq_idx, (b, length)),
        "initial_state": (initial_state, (b, d, weight.shape[1] - 1)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} of {list(tensor.shape)} does not fit {list(shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation {activation}; allowed: silu, None")
