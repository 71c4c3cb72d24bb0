"""Forward of the norm with dropout in Triton kernels; `ops.rmsnorm_triton` says what they compute.

Arguments of the mask are those of `ops.mask_kernels`, tiles those of `ops.rmsnorm_tile_kernels`.
"""

import triton
import triton.language as tl

from megatron_lengen.ops.mask_kernels import coordinates, keep_tile
from megatron_lengen.ops.rmsnorm_tile_kernels import (
    PLAIN,
    first_tile,
    inside_only,
    load_gains,
    normalized,
    number_of,
    place,
    put,
    sum_tile,
)


@triton.jit
def _pivots(x, residual, gain, inverse, row, rows, NORM: tl.constexpr, D: tl.constexpr):
    """x_hat of each row's first feature [R, 1], from which the others are measured: rows of a
    constant then have exactly their mean, and no variance."""
    first = row.to(tl.int64)[:, None] * D
    tile = sum_tile(x, residual, first, (row < rows)[:, None])
    gains = gain
    if gain is not None:
        gains = tl.load(gain)
    _, hat = normalized(tile, inverse, gains, NORM)
    return hat


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(values):
    """Sums over the features of values and of their squares: [R] each."""
    return tl.reduce((values, values * values), 1, _add_pairs)


@triton.jit
def _write_z(z, hat, keep, alpha, beta, offsets, inside, DROPOUT: tl.constexpr):
    if DROPOUT:
        hat = tl.where(keep, hat, 0.0) * alpha[:, None] + beta[:, None]
    tl.store(z + offsets, hat.to(z.dtype.element_ty), mask=inside)


@triton.jit
def _moments(distance, pivots, inside, D: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Mean and variance [R] of rows from their distances to a pivot.

    Without EXACT the sums are taken at once: where the pivot is a row's one outlier, the variance
    is off by D roundings of fp32, less than 16-bit numbers show.
    """
    if EXACT:
        offset = tl.sum(distance, 1) / D
        rest = inside_only(distance - offset[:, None], inside, D, BLOCK)
        variance = tl.sum(rest * rest, 1) / D
    else:
        sums, squares = _sums(distance)
        offset = sums / D
        variance = tl.maximum(squares / D - offset * offset, 0.0)
    return tl.sum(pivots, 1) + offset, variance


@triton.jit
def _wide_rms(
    x, residual, total, row, rows, eps, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr
):
    """1 / rms [R] of rows wider than a tile, and their sums with the residual."""
    squares = tl.zeros([R, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        offsets, inside = place(row, rows, start, D, BLOCK)
        tile = sum_tile(x, residual, offsets, inside)
        if residual is not None:
            tl.store(total + offsets, tile, mask=inside)
        squares += tile.to(tl.float32) * tile.to(tl.float32)
    if residual is not None:
        tl.debug_barrier()
    return tl.rsqrt(tl.sum(squares, 1) / D + eps)


@triton.jit
def _wide_moments(
    x, gain, inverse, pivots, row, rows, NORM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """`_moments` of rows wider than a tile: always exact, reading them twice."""
    offset = tl.zeros([R], tl.float32)
    for squared in tl.static_range(2):
        sums = tl.zeros([R, BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            offsets, inside = place(row, rows, start, D, BLOCK)
            tile = tl.load(x + offsets, mask=inside, other=0.0)
            _, hat = normalized(tile, inverse, load_gains(gain, start, D, BLOCK), NORM)
            distance = inside_only(hat - pivots - offset[:, None], inside, D, BLOCK)
            if squared == 1:
                distance = distance * distance
            sums += distance
        if squared == 0:
            offset = tl.sum(sums, 1) / D
        else:
            variance = tl.sum(sums, 1) / D
    return tl.sum(pivots, 1) + offset, variance


@triton.jit(do_not_specialize=PLAIN)
def forward(
    x, residual, gain, total, z, rstd, mean, variance, alpha, rows, eps, rate,
    positions, samples, key_low, key_high, stream, first_channel, threshold,
    COEFFICIENTS: tl.constexpr, NORM: tl.constexpr, MOMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, BATCH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Numbers of rows whose tile holds them whole, and z with COEFFICIENTS or without dropout.

    Outputs may be None.
    """
    row = first_tile(rows) * R + tl.arange(0, R)
    offsets, inside = place(row, rows, 0, D, BLOCK)
    tile = sum_tile(x, residual, offsets, inside)
    gains = load_gains(gain, 0, D, BLOCK)
    if residual is not None:
        tl.store(total + offsets, tile, mask=inside)
    inverse = tl.full([R], 1.0, tl.float32)
    if NORM:
        wide = tile.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
        put(rstd, row, rows, inverse)
    _, hat = normalized(tile, inverse, gains, NORM)
    if MOMENTS:
        pivots = _pivots(x, residual, gain, inverse, row, rows, NORM, D)
        distance = inside_only(hat - pivots, inside, D, BLOCK)
        mu, sigma2 = _moments(distance, pivots, inside, D, BLOCK, x.dtype.element_ty == tl.float32)
        put(mean, row, rows, mu)
        put(variance, row, rows, sigma2)
    if z is not None:
        keep, a, b = inside, inverse, inverse
        if DROPOUT:
            position, sample = coordinates(positions, samples, row, rows, BATCH)
            keep = keep_tile(
                position, sample, key_low, key_high, stream, first_channel, threshold, 0,
                ALIGNED, R, BLOCK,
            )  # fmt: skip
            a, b = COEFFICIENTS(mu, sigma2, rate)
            a, b = tl.zeros_like(mu) + a, tl.zeros_like(mu) + b
            put(alpha, row, rows, a)
        _write_z(z, hat, keep, a, b, offsets, inside, DROPOUT)


@triton.jit(do_not_specialize=PLAIN)
def forward_wide(
    x, residual, gain, total, z, rstd, mean, variance, alpha, rows, eps, rate,
    positions, samples, key_low, key_high, stream, first_channel, threshold,
    COEFFICIENTS: tl.constexpr, NORM: tl.constexpr, MOMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, BATCH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same for rows wider than a tile."""
    row = first_tile(rows) * R + tl.arange(0, R)
    inverse = tl.full([R], 1.0, tl.float32)
    if NORM:
        inverse = _wide_rms(x, residual, total, row, rows, eps, D, BLOCK, R)
        put(rstd, row, rows, inverse)
    if MOMENTS:
        pivots = _pivots(x, residual, gain, inverse, row, rows, NORM, D)
        mu, sigma2 = _wide_moments(total, gain, inverse, pivots, row, rows, NORM, D, BLOCK, R)
        put(mean, row, rows, mu)
        put(variance, row, rows, sigma2)
    if z is not None:
        position, sample = row.to(tl.uint32), row.to(tl.uint32)
        a, b = inverse, inverse
        if DROPOUT:
            position, sample = coordinates(positions, samples, row, rows, BATCH)
            a, b = COEFFICIENTS(mu, sigma2, rate)
            a, b = tl.zeros_like(mu) + a, tl.zeros_like(mu) + b
            put(alpha, row, rows, a)
        _apply(
            total, gain, z, inverse, a, b, row, rows, position, sample,
            key_low, key_high, stream, first_channel, threshold,
            NORM, DROPOUT, ALIGNED, D, BLOCK, R,
        )  # fmt: skip


@triton.jit
def _apply(
    x, gain, z, inverse, alpha, beta, row, rows, position, sample,
    key_low, key_high, stream, first_channel, threshold,
    NORM: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """z of rows whose numbers are known."""
    for start in range(0, D, BLOCK):
        offsets, inside = place(row, rows, start, D, BLOCK)
        tile = tl.load(x + offsets, mask=inside, other=0.0)
        _, hat = normalized(tile, inverse, load_gains(gain, start, D, BLOCK), NORM)
        keep = inside
        if DROPOUT:
            keep = keep_tile(
                position, sample, key_low, key_high, stream, first_channel, threshold, start,
                ALIGNED, R, BLOCK,
            )  # fmt: skip
        _write_z(z, hat, keep, alpha, beta, offsets, inside, DROPOUT)


@triton.jit(do_not_specialize=PLAIN)
def apply(
    x, gain, z, rstd, alpha, beta, rows,
    positions, samples, key_low, key_high, stream, first_channel, threshold,
    NORM: tl.constexpr, ALIGNED: tl.constexpr, BATCH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """z where alpha and beta come from elsewhere."""
    row = first_tile(rows) * R + tl.arange(0, R)
    position, sample = coordinates(positions, samples, row, rows, BATCH)
    inverse = number_of(rstd, row, rows)
    a, b = number_of(alpha, row, rows), number_of(beta, row, rows)
    _apply(
        x, gain, z, inverse, a, b, row, rows, position, sample,
        key_low, key_high, stream, first_channel, threshold,
        NORM, True, ALIGNED, D, BLOCK, R,
    )  # fmt: skip
