"""Mamba's short convolution: depthwise, causal, with an activation behind it.

Shapes: b rows, l tokens, d channels, w taps; channels come last, as projections leave them. The
state is what the next token needs of those before it: their w - 1 last inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import causal_conv_native, mamba_kernels, native


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
    earlier = weight.shape[1] - 1
    if initial_state is None:
        before = x.new_zeros(x.shape[0], earlier, x.shape[2])
    else:
        before = initial_state.transpose(1, 2).to(x.dtype)
    reach = None if seq_idx is None else _reach(seq_idx, earlier)
    y = None
    if x.is_cuda and x.numel():
        given = None if initial_state is None else before
        documents = None if seq_idx is None else document_numbers(seq_idx)
        y = mamba_kernels.conv(x, weight, bias, given, documents, activation == "silu")
    if y is None:
        y = _Convolution.apply(x, weight, bias, before, reach, activation == "silu")
    if not return_final_state:
        return y
    last = torch.cat((before, x[:, max(0, x.shape[1] - earlier) :]), dim=1)
    last = last[:, last.shape[1] - earlier :]
    if reach is not None and x.shape[1]:
        # The next token sees nothing of the documents before its own.
        back = torch.arange(earlier - 1, -1, -1, device=x.device)
        last = last * (back <= reach[:, -1:])[..., None]
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
    by_kernel = mamba_kernels.conv_update(x, state, weight, bias, activation == "silu")
    if by_kernel is not None:
        return by_kernel
    wide = torch.promote_types(x.dtype, torch.float32)
    window = torch.cat((state.to(x.dtype), x[..., None]), dim=2)
    y = (window.to(wide) * weight.to(wide)).sum(2)
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activation else y).to(x.dtype), window[:, :, 1:]


class _Convolution(torch.autograd.Function):
    """Keeps its inputs alone; what lies before the activation is computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor,
        reach: Tensor | None,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, before, reach)
        ctx.silu = silu
        if native.serves(x):
            return causal_conv_native.forward(x, weight, bias, before, reach, silu)
        return _convolve(x, weight, before, reach, silu, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, before, reach = ctx.saved_tensors
        if native.serves(x):
            dx, dweight, dbias, dbefore = causal_conv_native.backward(
                x, weight, bias, before, reach, ctx.silu, dy.to(x.dtype)
            )
            cast = None if bias is None else dbias.to(bias.dtype)
            return dx, dweight.to(weight.dtype), cast, dbefore.to(before.dtype), None, None
        given = [x, weight, before] if bias is None else [x, weight, before, bias]
        with torch.enable_grad():
            again = [tensor.detach().requires_grad_() for tensor in given]
            own_bias = None if bias is None else again[3]
            y = _convolve(again[0], again[1], again[2], reach, ctx.silu, own_bias)
            found = torch.autograd.grad(y, again, dy)
        return found[0], found[1], None if bias is None else found[3], found[2], None, None


def _convolve(
    x: Tensor,
    weight: Tensor,
    before: Tensor,
    reach: Tensor | None,
    silu: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """The same as PyTorch operations; arguments as `_Convolution`'s."""
    taps, length = weight.shape[1], x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    values, weights = torch.cat((before, x), dim=1).to(wide), weight.to(wide)
    y = values[:, taps - 1 :] * weights[:, taps - 1]
    for back in range(1, taps):
        tap = taps - 1 - back
        term = values[:, tap : tap + length]
        if reach is not None:
            term = term * (reach >= back)[..., None]
        y = torch.addcmul(y, term, weights[:, tap])
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if silu else y).to(x.dtype)


def document_numbers(seq_idx: Tensor) -> Tensor:
    """int32 [b, l] that only grows, from 0: an old number that comes again is a new document."""
    changes = (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1, dtype=torch.int32)
    return F.pad(changes, (1, 0))[:, : seq_idx.shape[1]]


def _reach(seq_idx: Tensor, most: int) -> Tensor:
    """How many earlier inputs of its document a token has, at most `most`: int32 [b, l].

    The first document of a row goes on from before it.
    """
    numbers = torch.arange(seq_idx.shape[1], dtype=torch.int32, device=seq_idx.device)
    starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))[:, : seq_idx.shape[1]]
    first = torch.where(starts, numbers, -most).cummax(1).values
    return (numbers - first).clamp(max=most).to(torch.int32)


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
