"""Backward of the norm with dropout in Triton kernels; `ops.rmsnorm_triton` says what they compute.

Arguments of the mask are those of `ops.mask_kernels`, tiles those of `ops.rmsnorm_tile_kernels`.
"""

import triton
import triton.language as tl

from megatron_lengen.ops.mask_kernels import coordinates, keep_tile
from megatron_lengen.ops.rmsnorm_tile_kernels import (
    PLAIN,
    first_tile,
    load_gains,
    normalized,
    number_of,
    place,
    put,
)


@triton.jit(do_not_specialize=PLAIN)
def coefficient_grads(
    x, gain, dz, rstd, alpha_grad, beta_grad, rows,
    positions, samples, key_low, key_high, stream, first_channel, threshold,
    NORM: tl.constexpr, ALIGNED: tl.constexpr, BATCH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """d loss / d alpha and d loss / d beta of rows."""
    row = first_tile(rows) * R + tl.arange(0, R)
    position, sample = coordinates(positions, samples, row, rows, BATCH)
    inverse = number_of(rstd, row, rows)
    of_alpha, of_beta = tl.zeros([R, BLOCK], tl.float32), tl.zeros([R, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        offsets, inside = place(row, rows, start, D, BLOCK)
        tile = tl.load(x + offsets, mask=inside, other=0.0)
        grad = tl.load(dz + offsets, mask=inside, other=0.0).to(tl.float32)
        _, hat = normalized(tile, inverse, load_gains(gain, start, D, BLOCK), NORM)
        keep = keep_tile(
            position, sample, key_low, key_high, stream, first_channel, threshold, start,
            ALIGNED, R, BLOCK,
        )  # fmt: skip
        of_alpha += tl.where(keep, grad * hat, 0.0)
        of_beta += grad
    put(alpha_grad, row, rows, tl.sum(of_alpha, 1))
    put(beta_grad, row, rows, tl.sum(of_beta, 1))


@triton.jit
def _hat_grad(
    tile, grad, gains, inverse, alpha, moments, position, sample,
    key_low, key_high, stream, first_channel, threshold, start,
    NORM: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x / rms, and the gradient at x_hat; `moments`: `_moments_of`, or None for constants."""
    unit, hat = normalized(tile, inverse, gains, NORM)
    grad = grad.to(tl.float32)
    if DROPOUT:
        keep = keep_tile(
            position, sample, key_low, key_high, stream, first_channel, threshold, start,
            ALIGNED, R, BLOCK,
        )  # fmt: skip
        grad = tl.where(keep, grad, 0.0) * alpha[:, None]
    if moments is not None:
        mean, mean_grad, variance_grad = moments
        grad += mean_grad[:, None] + 2 * variance_grad[:, None] * (hat - mean[:, None])
    return unit, grad


@triton.jit
def _moments_of(mean, mean_grad, variance_grad, row, rows, D: tl.constexpr):
    """Mean and d loss / d (mean, variance) / D of rows."""
    shift, scale = number_of(mean_grad, row, rows) / D, number_of(variance_grad, row, rows) / D
    return number_of(mean, row, rows), shift, scale


@triton.jit
def _write_dx(dx, total_grad, unit, grad, inverse, dot, offsets, inside, NORM: tl.constexpr):
    if NORM:
        grad = inverse[:, None] * (grad - unit * dot[:, None])
    if total_grad is not None:
        grad += tl.load(total_grad + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + offsets, grad.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=PLAIN)
def backward(
    x, gain, dz, total_grad, dx, partial, rstd, alpha, mean, mean_grad, variance_grad, rows,
    positions, samples, key_low, key_high, stream, first_channel, threshold,
    NORM: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, BATCH: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dx of every so many tiles, and their sum of the gain's gradient: partial [programs, D]."""
    first, step = first_tile(rows), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    gains = load_gains(gain, 0, D, BLOCK)
    gain_grad = tl.zeros([R, BLOCK], tl.float32)
    # A tile's numbers are on their way while the one before it is worked on.
    row = first * R + tl.arange(0, R)
    offsets, inside = place(row, rows, 0, D, BLOCK)
    tile = tl.load(x + offsets, mask=inside, other=0.0)
    grad = tl.load(dz + offsets, mask=inside, other=0.0)
    inverse, a = number_of(rstd, row, rows), number_of(alpha, row, rows)
    position, sample = row.to(tl.uint32), row.to(tl.uint32)
    if DROPOUT:
        position, sample = coordinates(positions, samples, row, rows, BATCH)
    for number in range(first, tl.cdiv(rows, R), step):
        next_row = (number + step) * R + tl.arange(0, R)
        next_offsets, next_inside = place(next_row, rows, 0, D, BLOCK)
        next_tile = tl.load(x + next_offsets, mask=next_inside, other=0.0)
        next_grad = tl.load(dz + next_offsets, mask=next_inside, other=0.0)
        next_inverse, next_a = number_of(rstd, next_row, rows), number_of(alpha, next_row, rows)
        next_position, next_sample = position, sample
        if DROPOUT:
            next_position, next_sample = coordinates(positions, samples, next_row, rows, BATCH)
        moments = None
        if mean is not None:
            moments = _moments_of(mean, mean_grad, variance_grad, row, rows, D)
        unit, hat_grad = _hat_grad(
            tile, grad, gains, inverse, a, moments, position, sample,
            key_low, key_high, stream, first_channel, threshold, 0,
            NORM, DROPOUT, ALIGNED, R, BLOCK,
        )  # fmt: skip
        dot = inverse
        if gain is not None:
            gain_grad += hat_grad * unit
            hat_grad *= gains.to(tl.float32)
        if NORM:
            dot = tl.sum(hat_grad * unit, 1) / D
        _write_dx(dx, total_grad, unit, hat_grad, inverse, dot, offsets, inside, NORM)
        row, offsets, inside, tile, grad = next_row, next_offsets, next_inside, next_tile, next_grad
        inverse, a, position, sample = next_inverse, next_a, next_position, next_sample
    if gain is not None:
        at = partial + first.to(tl.int64) * D + column
        tl.store(at, tl.sum(gain_grad, 0), mask=column < D)


@triton.jit(do_not_specialize=PLAIN)
def backward_wide(
    x, gain, dz, total_grad, dx, partial, rstd, alpha, mean, mean_grad, variance_grad, rows,
    positions, samples, key_low, key_high, stream, first_channel, threshold,
    NORM: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, BATCH: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same for rows wider than a tile; `partial` holds zeros and is added to in memory."""
    first, step = first_tile(rows), tl.num_programs(0)
    for number in range(first, rows, step):
        row = number * R + tl.arange(0, R)
        inverse, a = number_of(rstd, row, rows), number_of(alpha, row, rows)
        moments = None
        if mean is not None:
            moments = _moments_of(mean, mean_grad, variance_grad, row, rows, D)
        position, sample = row.to(tl.uint32), row.to(tl.uint32)
        if DROPOUT:
            position, sample = coordinates(positions, samples, row, rows, BATCH)
        # The first time for the dot product of x / rms and its gradient, the second for dx.
        dot = tl.zeros([R], tl.float32)
        for last in tl.static_range(0 if NORM else 1, 2):
            products = tl.zeros([R, BLOCK], tl.float32)
            for start in range(0, D, BLOCK):
                offsets, inside = place(row, rows, start, D, BLOCK)
                gains = load_gains(gain, start, D, BLOCK)
                unit, hat_grad = _hat_grad(
                    tl.load(x + offsets, mask=inside, other=0.0),
                    tl.load(dz + offsets, mask=inside, other=0.0),
                    gains, inverse, a, moments, position, sample,
                    key_low, key_high, stream, first_channel, threshold, start,
                    NORM, DROPOUT, ALIGNED, R, BLOCK,
                )  # fmt: skip
                if gain is not None:
                    if last == 1:
                        at = partial + first.to(tl.int64) * D + start + tl.arange(0, BLOCK)[None, :]
                        exists = start + tl.arange(0, BLOCK)[None, :] < D
                        so_far = tl.load(at, mask=exists, other=0.0)
                        tl.store(at, so_far + hat_grad * unit, mask=exists)
                    hat_grad *= gains.to(tl.float32)
                if last == 0:
                    products += hat_grad * unit
                else:
                    _write_dx(dx, total_grad, unit, hat_grad, inverse, dot, offsets, inside, NORM)
            if last == 0:
                dot = tl.sum(products, 1) / D
        tl.debug_barrier()


@triton.jit(do_not_specialize=PLAIN)
def sum_partials(
    partial, gain_grad, programs, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr
):
    """The gain's gradient [D] from partial sums [programs, D], always added in the same order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([R, BLOCK], tl.float32)
    for start in range(0, programs, R):
        number = start + tl.arange(0, R)
        inside = (number < programs)[:, None] & (column < D)[None, :]
        at = partial + number.to(tl.int64)[:, None] * D + column[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(gain_grad + column, tl.sum(total, 0).to(gain_grad.dtype.element_ty), mask=column < D)
