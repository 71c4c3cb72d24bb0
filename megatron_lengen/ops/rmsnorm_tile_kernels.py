"""Tiles of the norm's Triton kernels: where they lie, what is read, x_hat.

A program has tiles of [R, BLOCK]: R whole rows where BLOCK reaches over their D features, and
otherwise one row, BLOCK features at a time. `row` [R] numbers rows of the flattened [s, b]; `start`
is a tile's first feature.
"""

import triton
import triton.language as tl

# Arguments with a new value in every layer or step: no kernel is compiled for a value.
PLAIN = [
    "rows", "eps", "rate", "key_low", "key_high", "stream", "first_channel", "threshold",
    "programs",
]  # fmt: skip


@triton.jit
def place(row, rows, start, D: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets [R, BLOCK] of a tile, beyond 32 bits where need be, and which of them exist."""
    column = start + tl.arange(0, BLOCK)
    offsets = row.to(tl.int64)[:, None] * D + column[None, :]
    inside = (row < rows)[:, None]
    if D % BLOCK != 0:
        inside = inside & (column < D)[None, :]
    return offsets, inside


@triton.jit
def sum_tile(x, residual, offsets, inside):
    """x, or the sum of x and the residual, rounded to their dtype."""
    tile = tl.load(x + offsets, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + offsets, mask=inside, other=0.0)
        tile = (tile.to(tl.float32) + added.to(tl.float32)).to(tile.dtype)
    return tile


@triton.jit
def inside_only(values, inside, D: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros beyond a row's end."""
    if D % BLOCK != 0:
        values = tl.where(inside, values, 0.0)
    return values


@triton.jit
def load_gains(gain, start, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr = 1):
    """[R, BLOCK] of the gain; 1 without one, since Triton 3.6 cannot return None.

    With the R of a tile its elements lie in registers as the tile's do, at the price of more reads.
    """
    if gain is None:
        return tl.full([1, BLOCK], 1.0, tl.float32)
    else:
        column = tl.zeros([R, 1], tl.int32) + (start + tl.arange(0, BLOCK))[None, :]
        return tl.load(gain + column, mask=column < D, other=0.0)


@triton.jit
def normalized(tile, inverse, gains, NORM: tl.constexpr):
    """x / rms and x_hat, rounded where Hugging Face's RMSNorm rounds, as fp32."""
    unit = tile.to(tl.float32)
    if NORM:
        unit = (unit * inverse[:, None]).to(tile.dtype).to(tl.float32)
    hat = unit
    if gains is not None:
        hat = (unit * gains.to(tl.float32)).to(tile.dtype).to(tl.float32)
    return unit, hat


@triton.jit
def number_of(numbers, row, rows):
    """One fp32 number of each row; 1 where there are none."""
    if numbers is None:
        return tl.full(row.shape, 1.0, tl.float32)
    else:
        return tl.load(numbers + row, mask=row < rows, other=0.0)


@triton.jit
def put(numbers, row, rows, value):
    if numbers is not None:
        tl.store(numbers + row, value, mask=row < rows)


@triton.jit
def first_tile(rows):
    """This program's number; of 64 bits where `rows` is."""
    return tl.program_id(0).to(rows.dtype)
