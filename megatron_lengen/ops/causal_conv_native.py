"""The convolution of `ops.causal_conv` through native_conv.cpp: one pass over its tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_lengen.ops import native

# Tokens of a block: each reads a few of its neighbours' again, and has its own partial sums.
_BLOCK = 256


class _Call(ctypes.Structure):
    """Mirrors `struct Call` in native_conv.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "rows", "tokens", "channels", "taps", "block", "threads", "x_row", "x_token",
                "dy_row", "dy_token",
            )
        ),
        ("silu", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x", "weight", "bias", "before", "reach", "y", "dy", "dx", "dweight", "dbias",
                "dbefore",
            )
        ),
    )  # fmt: skip


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor,
    reach: Tensor | None,
    silu: bool,
) -> Tensor:
    """y [b, l, d]; arguments as in `ops.causal_conv`."""
    y = torch.empty(x.shape, dtype=x.dtype)
    _run("forward", x, weight, bias, before, reach, silu, {"y": y})
    return y


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor,
    reach: Tensor | None,
    silu: bool,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and before; those of weights in fp32."""
    b, length, d = x.shape
    taps, blocks = weight.shape[1], -(-length // _BLOCK)
    dx = torch.empty(x.shape, dtype=x.dtype)
    dweight = torch.empty(b * blocks, taps, d, dtype=torch.float32)
    dbias = torch.empty(b * blocks, d, dtype=torch.float32)
    dbefore = torch.empty(b, taps - 1, d, dtype=torch.float32)
    tensors = {"dy": dy, "dx": dx, "dweight": dweight, "dbias": dbias, "dbefore": dbefore}
    _run("backward", x, weight, bias, before, reach, silu, tensors)
    return dx, dweight.sum(0).t(), dbias.sum(0), dbefore


def _run(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor,
    reach: Tensor | None,
    silu: bool,
    tensors: dict[str, Tensor],
) -> None:
    """Call one kernel; the tensors it reads stay alive until it returns."""
    b, length, d = x.shape
    call = _Call(
        rows=b,
        tokens=length,
        channels=d,
        taps=weight.shape[1],
        block=_BLOCK,
        threads=torch.get_num_threads(),
        silu=silu,
    )
    alive = dict(tensors, x=x)
    for field in ("x", "dy"):
        if field in alive:
            alive[field] = tensor = _dense_tokens(alive[field])
            setattr(call, f"{field}_row", tensor.stride(0))
            setattr(call, f"{field}_token", tensor.stride(1))
    alive["weight"] = weight.float().t().contiguous()
    alive["bias"] = (
        torch.zeros(d, dtype=torch.float32) if bias is None else bias.float().contiguous()
    )
    alive["before"] = before.float().contiguous()
    if reach is not None:
        alive["reach"] = reach.contiguous()
    for field, tensor in alive.items():
        setattr(call, field, tensor.data_ptr())
    native.run(f"conv_{name}", x.dtype, call)


def _dense_tokens(x: Tensor) -> Tensor:
    """[b, l, d] whose channels lie side by side; the tokens themselves need not."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
