"""The scan of `ops.ssd_chunks` through native_ssd.cpp: a chunk of one head in cache at a time."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_lengen.ops import native
from megatron_lengen.ops.ssd_chunks import Grads, Inputs

_LANE = 16
_SEGMENT_TOKENS = 64 * 16
# Pieces of work that are made at least, where there are heads for it; more of them share less.
_LEAST_UNITS = 8


class _Call(ctypes.Structure):
    """Mirrors `struct Call` in native_ssd.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "rows", "tokens", "groups", "heads", "channels", "state", "heads_of_unit",
                "threads", "half", "x_row", "x_token", "b_row", "b_token", "c_row", "c_token",
                "dy_row", "dy_token",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x", "b", "c", "dt", "a", "d", "documents", "initial", "y", "final", "kept", "dy",
                "dfinal", "dx", "ddt", "db", "dc", "da", "dd", "dinitial",
            )
        ),
    )  # fmt: skip


def library_for(inputs: Inputs) -> ctypes.CDLL | None:
    """The kernels, where they can compute this."""
    x = inputs.x
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    if not fits or {inputs.B.dtype, inputs.C.dtype} != {x.dtype}:
        return None
    return native.load_library()


def forward(
    library: ctypes.CDLL, inputs: Inputs, initial: Tensor | None, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The scan.

    Args:
        initial: [b, h, p, n] or None for zeros.
        final: whether the last state is wanted.
        keep: whether backward will follow.

    Returns:
        y, the last state or None, and what backward needs: [] or the states at every segment.
    """
    x, n = inputs.x, inputs.B.shape[3]
    b, length, h, p = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    last = torch.empty(b, h, p, n, dtype=torch.float32) if final else None
    kept = None
    if keep:
        size = -(-n // _LANE) * _LANE * (-(-p // _LANE) * _LANE)
        kept = torch.empty(b, h, -(-length // _SEGMENT_TOKENS), size, dtype=torch.float32)
    _run(library, "forward", inputs, {"initial": initial, "y": y, "final": last, "kept": kept})
    return y, last, [] if kept is None else [kept]


def backward(
    library: ctypes.CDLL,
    inputs: Inputs,
    initial: Tensor | None,
    kept: list[Tensor],
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Grads, Tensor | None]:
    """Gradients of everything in `Inputs`, and of the initial state, if there is one."""
    x, groups, n = inputs.x, *inputs.B.shape[2:]
    b, length, h, p = x.shape
    parts = -(-(h // groups) // _heads_of_unit(inputs))
    dx = torch.empty(x.shape, dtype=x.dtype)
    ddt = torch.empty(b, length, h, dtype=torch.float32)
    db, dc = torch.empty(2, parts, b, length, groups, n, dtype=torch.float32)
    da, dd = torch.empty(2, b, h, dtype=torch.float32)
    found = {"dx": dx, "ddt": ddt, "db": db, "dc": dc, "da": da, "dd": dd}
    dinitial = None if initial is None else torch.empty(b, h, p, n, dtype=torch.float32)
    given = {"initial": initial, "kept": kept[0], "dfinal": dfinal, "dinitial": dinitial}
    _run(library, "backward", inputs, {**given, **found}, dy)
    db, dc = (part[0] if parts == 1 else part.sum(0) for part in (db, dc))
    return Grads(dx, ddt, da.sum(0), db, dc, dd.sum(0)), dinitial


def _heads_of_unit(inputs: Inputs) -> int:
    """Heads that share their group's products and sums: as many as leave enough pieces of work."""
    of_group = inputs.x.shape[2] // inputs.B.shape[2]
    parts = -(-_LEAST_UNITS // (inputs.x.shape[0] * inputs.B.shape[2]))
    return max(1, of_group // parts)


def _run(
    library: ctypes.CDLL,
    name: str,
    inputs: Inputs,
    tensors: dict[str, Tensor | None],
    dy: Tensor | None = None,
) -> None:
    """Call one kernel; the tensors it reads stay alive until it returns."""
    b, length, h, p = inputs.x.shape
    call = _Call(
        rows=b,
        tokens=length,
        groups=inputs.B.shape[2],
        heads=h,
        channels=p,
        state=inputs.B.shape[3],
        heads_of_unit=_heads_of_unit(inputs),
        threads=torch.get_num_threads(),
        half=inputs.x.dtype == torch.bfloat16,
    )
    alive = {field: tensor for field, tensor in tensors.items() if tensor is not None}
    by_token = {"x": inputs.x, "b": inputs.B, "c": inputs.C}
    for field, tensor in (by_token if dy is None else {**by_token, "dy": dy}).items():
        alive[field] = dense = _dense_tokens(tensor)
        setattr(call, f"{field}_row", dense.stride(0))
        setattr(call, f"{field}_token", dense.stride(1))
    alive |= {"dt": inputs.dt, "a": inputs.A}
    if inputs.D is not None:
        alive["d"] = inputs.D
    for field in {"dt", "a", "d", "initial", "dfinal"} & alive.keys():
        alive[field] = alive[field].float().contiguous()
    if inputs.documents is not None:
        alive["documents"] = inputs.documents.int().contiguous()
    for field, tensor in alive.items():
        setattr(call, field, tensor.data_ptr())
    getattr(library, f"lengen_ssd_{name}")(ctypes.byref(call))


def _dense_tokens(x: Tensor) -> Tensor:
    """[b, l, ...] whose numbers of one token lie side by side; the tokens themselves need not."""
    return x if x[0, 0].is_contiguous() else x.contiguous()
