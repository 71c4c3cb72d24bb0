"""The state space recurrence of Mamba2 (SSD, Dao & Gu 2024), for whole rows and for one token.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T,   y_t = C_t h_t + D x_t

Memory grows linearly with the length: the autograd function keeps its inputs and some states.
Shapes: b rows, l tokens, h heads, p channels of a head, g groups, n numbers of state for each
channel; head i reads B and C of group i // (h // g).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops import mamba_kernels, ssd_chunks, ssd_native
from megatron_lengen.ops.causal_conv import document_numbers
from megatron_lengen.ops.ssd_chunks import Inputs


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 256,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence over whole rows.

    Args:
        x: [b, l, h, p].
        dt: [b, l, h], positive.
        A: [h], negative.
        B, C: [b, l, g, n].
        chunk_size: how mamba-ssm's kernels cut rows; the result does not depend on it.
        D: [h] or None.
        seq_idx: int [b, l], the document of each token, or None; the state is zero where a new
            one starts.
        initial_states: [b, h, p, n], the state before the first token; it belongs to the first
            document.
        return_final_states: whether the state after the last token is returned, too.

    Returns:
        y [b, l, h, p] in x's dtype, or (y, states [b, h, p, n]); states are fp32 (fp64 for fp64).

    Raises:
        ValueError: for shapes that do not fit each other.
    """
    _check(x, dt, A, B, C, D, seq_idx, initial_states, chunk_size)
    if not x.numel():
        return _of_nothing(x, B, initial_states, return_final_states)
    documents = None if seq_idx is None else document_numbers(seq_idx)
    by_kernel = mamba_kernels.scan(
        x, dt, A, B, C, chunk_size=chunk_size, D=D, documents=documents, initial=initial_states
    )
    if by_kernel is not None:
        return by_kernel if return_final_states else by_kernel[0]
    y, final = _Scan.apply(
        x, dt, A, B, C, D, initial_states, documents, return_final_states, torch.is_grad_enabled()
    )
    return (y, final) if return_final_states else y


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence's next token.

    Args:
        x: [b, h, p].
        dt: [b, h], positive.
        A: [h], negative.
        B, C: [b, g, n].
        state: [b, h, p, n]; it is not changed.
        D: [h] or None.

    Returns:
        y [b, h, p] in x's dtype, and the new state.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    g = B.shape[1]
    values, steps = x.to(wide), dt.to(wide)
    own_B, own_C = (z.to(wide).repeat_interleave(x.shape[1] // g, dim=1) for z in (B, C))
    decay = (steps * A.to(wide)).exp()[..., None, None]
    added = (steps[..., None] * values)[..., None] * own_B[:, :, None]
    state = torch.addcmul(added, decay, state.to(wide))
    y = (state @ own_C[..., None])[..., 0]
    if D is not None:
        y = torch.addcmul(y, values, D.to(wide)[:, None])
    return y.to(x.dtype), state


class _Scan(torch.autograd.Function):
    """Compiled kernels where they serve, PyTorch operations elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial: Tensor | None,
        documents: Tensor | None,
        with_final: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(x, dt, A, B, C, D, documents)
        ctx.set_materialize_grads(False)
        library = ssd_native.library_for(inputs)
        final: Tensor | None
        if library is None:
            y, final, kept = ssd_chunks.forward(inputs, initial)
        else:
            y, final, kept = ssd_native.forward(
                library, inputs, initial, final=with_final, keep=keep
            )
        ctx.save_for_backward(*inputs, initial, *kept)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: recomputation under torch.utils.checkpoint gives them only once.
        saved, fields = ctx.saved_tensors, len(Inputs._fields)
        inputs = Inputs(*saved[:fields])
        initial, *kept = saved[fields:]
        dy = torch.zeros_like(inputs.x) if dy is None else dy.to(inputs.x.dtype)
        library = ssd_native.library_for(inputs)
        dinitial: Tensor | None
        if library is None:
            grads, dinitial = ssd_chunks.backward(inputs, kept, dy, dfinal)
        else:
            grads, dinitial = ssd_native.backward(library, inputs, initial, kept, dy, dfinal)
        pairs = zip((*grads, dinitial), (*inputs[:-1], initial), strict=True)
        cast = (None if to is None or grad is None else grad.to(to.dtype) for grad, to in pairs)
        return *cast, None, None, None


def _of_nothing(
    x: Tensor, B: Tensor, initial: Tensor | None, with_final: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """No token, no row or no channel: the state stays."""
    y = torch.zeros_like(x)
    if not with_final:
        return y
    wide = torch.promote_types(x.dtype, torch.float32)
    if initial is None:
        initial = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=wide)
    return y, initial.to(wide)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    chunk_size: int,
) -> None:
    if x.dim() != 4 or B.dim() != 4:
        raise ValueError(f"x of {list(x.shape)} and B of {list(B.shape)}: found no four dimensions")
    b, length, h, p = x.shape
    g, n = B.shape[2:]
    wanted = {
        "dt": (dt, (b, length, h)),
        "A": (A, (h,)),
        "B": (B, (b, length, g, n)),
        "C": (C, (b, length, g, n)),
        "D": (D, (h,)),
        "seq_idx": (seq_idx, (b, length)),
        "initial_states": (initial_states, (b, h, p, n)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} of {list(tensor.shape)} does not fit {list(shape)}")
    if g < 1 or h % g:
        raise ValueError(f"{h} heads cannot be shared out among {g} groups")
    if chunk_size < 1:
        raise ValueError(f"chunks of {chunk_size} tokens")
