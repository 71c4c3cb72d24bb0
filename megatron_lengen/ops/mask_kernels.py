"""The mask of `ops.mask` in Triton code: the same bits, drawn where a tile of elements is at hand.

Kernels get key, counter word c3 (`stream`) and positions and samples of rows; `start` is a tile's
first channel, counted from `first_channel`.
"""

import triton
import triton.language as tl


@triton.jit
def _product(value, FACTOR: tl.constexpr):
    """High and low word of a 32 x 32 bit product, by one instruction (mul.wide.u32)."""
    product = value.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, key_low, key_high):
    """Philox4x32-10. Words that rows or groups share keep their shape: less work in two rounds."""
    for _ in tl.static_range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keep_tile(
    position, sample, key_low, key_high, stream, first_channel, threshold, start,
    ALIGNED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether elements are kept: [R, BLOCK]; ALIGNED where first_channel is a multiple of 8."""
    key_low, key_high = key_low.to(tl.uint32), key_high.to(tl.uint32)
    c1, c2, c3 = position[:, None], sample[:, None], stream.to(tl.uint32)
    # A half word in the upper 16 bits compares like the half word.
    bound = threshold.to(tl.uint32) << 16
    if ALIGNED:
        group = (first_channel + start) // 8 + tl.arange(0, BLOCK // 8)
        c0 = group.to(tl.uint32)[None, :]
        w0, w1, w2, w3 = _philox(c0, c1, c2, c3, key_low, key_high)
        # The last join is the fastest index: word // 2, word % 2, half.
        low = tl.join(
            tl.join(w0 << 16 >= bound, w2 << 16 >= bound),
            tl.join(w1 << 16 >= bound, w3 << 16 >= bound),
        )
        high = tl.join(tl.join(w0 >= bound, w2 >= bound), tl.join(w1 >= bound, w3 >= bound))
        return tl.reshape(tl.join(low, high), [R, BLOCK])
    else:
        channel = first_channel + start + tl.arange(0, BLOCK)
        c0 = (channel // 8).to(tl.uint32)[None, :]
        w0, w1, w2, w3 = _philox(c0, c1, c2, c3, key_low, key_high)
        place = (channel % 8)[None, :]
        word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
        return tl.where(place % 2 == 0, word << 16, word) >= bound


@triton.jit
def coordinates(positions, samples, row, rows, BATCH: tl.constexpr):
    """The low words of position and sample of rows: [R] each."""
    inside = row < rows
    position = tl.load(positions + row // BATCH, mask=inside, other=0)
    sample = tl.load(samples + row % BATCH, mask=inside, other=0)
    return position.to(tl.uint32), sample.to(tl.uint32)
