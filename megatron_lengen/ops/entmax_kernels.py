"""The Triton kernels of `ops.entmax_triton`, which says what they compute.

`sight` is what a tile of queries sees with: its queries [M, D], k of its batch and head and the
stride of its rows, the queries' numbers among the keys and their documents [M], documents of its
batch, slope, scale, window, number of keys, channels.
"""

import triton
import triton.language as tl

# A mark holds the number of the last pass that found its blocks able to have weight.
WITH_WEIGHT = tl.constexpr(127)
MOST_STEPS = tl.constexpr(50)
# Newton's error squares with each step: after one as small as this, tau is exact in fp32.
LAST_STEP = tl.constexpr(1e-5)


@triton.jit
def _rows(x, numbers, stride, length, channels, SIZE: tl.constexpr):
    """Rows of a [length, channels] matrix, zeros beyond its ends: [numbers, SIZE]."""
    c = tl.arange(0, SIZE)
    inside = (numbers < length)[:, None] & (c < channels)[None, :]
    return tl.load(x + numbers.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)


@triton.jit
def _of_head(x, strides, batch, head):
    """x from the rows of a batch and a head on; offsets go beyond 32 bits."""
    return x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def _dot(a, b):
    """a @ b, summed in fp32; no TF32 for fp32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(sight, block, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """(alpha - 1) score of a tile and a block, -inf where a key is not seen: [M, N]; the keys."""
    q, k, k_stride, i, document_i, documents, slope, scale, window, length, channels = sight
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = _rows(k, j, k_stride, length, channels, BLOCK_D)
    distance = i[:, None] - j[None, :]
    seen = (distance >= 0) & (distance < window)
    if documents is not None:
        document_j = tl.load(documents + j, mask=j < length, other=-1)
        seen = seen & (document_i[:, None] == document_j[None, :])
    products = _dot(q, tl.trans(keys))
    return tl.where(seen, (products * scale - slope * distance) / E, float("-inf")), keys


@triton.jit
def _powers(u, E: tl.constexpr):
    """u^e and u^(e - 1), both 0 where u is."""
    if E == 2:
        return u * u, u
    elif E == 1:
        return u, tl.where(u > 0, 1.0, 0.0)
    else:
        low = tl.where(u > 0, tl.exp2(tl.log2(tl.maximum(u, 1e-30)) * (E - 1)), 0.0)
        return low * u, low


@triton.jit
def _newton(weights, slopes, E: tl.constexpr):
    """Newton's step for ||u||_e = 1 from the sums of u^e and of u^(e - 1)."""
    if E == 1:
        return (weights - 1) / slopes
    elif E == 2:
        return (weights - tl.sqrt(weights)) / slopes
    else:
        log = tl.log2(weights) / E
        return (tl.exp2(log) - 1) * tl.exp2(log * (E - 1)) / slopes


@triton.jit
def _any(x):
    """Whether some element of [M, N] is above 0."""
    return tl.max(tl.max(x, 1), 0) > 0


@triton.jit
def _mark(mark, number, where):
    tl.store(mark, number.to(tl.int8), mask=where)


@triton.jit
def _sight(
    q, k, q_strides, k_strides, tile, batch, head, group, documents, slopes, scale, window,
    queries, keys, channels, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`sight`, and the rows of the tile [M]; rows beyond the last one repeat it."""
    rows = tl.minimum(tile * BLOCK_M + tl.arange(0, BLOCK_M), queries - 1)
    i = rows + (keys - queries)
    document_i = i
    if documents is not None:
        documents += batch * keys
        document_i = tl.load(documents + i)
    q = _of_head(q, q_strides, batch, head)
    tile_queries = _rows(q, rows, q_strides[2], queries, channels, BLOCK_D)
    k = _of_head(k, k_strides, batch, group)
    slope = tl.load(slopes + head)
    sight = (
        tile_queries, k, k_strides[2], i, document_i, documents, slope, scale, window, keys,
        channels,
    )  # fmt: skip
    return sight, rows


# ---- forward -------------------------------------------------------------------------------------


@triton.jit
def _largest(
    sight, first, count, marks, per_mark,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest (alpha - 1) score of each query [M]; marks blocks within 1 of it so far."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for back in range(count):
        block = first + count - 1 - back
        x, _ = _scores(sight, block, E, BLOCK_D, BLOCK_N)
        of_block = tl.max(x, 1)
        m = tl.maximum(m, of_block)
        possible = tl.max(tl.where(of_block > m - 1, 1, 0), 0) > 0
        _mark(marks + block // per_mark, tl.full([], 1, tl.int32), possible)
    tl.debug_barrier()
    return m


@triton.jit
def _sums(
    sight, m, tau, first, count, marks, per_mark, number,
    E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of u^e and of u^(e - 1) over the blocks that the pass before marked: [M] each."""
    weights, slopes = tl.zeros_like(m), tl.zeros_like(m)
    for back in range(count):
        block = first + count - 1 - back
        mark = marks + block // per_mark
        if tl.load(mark) >= number - 1:
            x, _ = _scores(sight, block, E, BLOCK_D, BLOCK_N)
            u = tl.maximum(x - m[:, None] - tau[:, None], 0.0)
            of_weights, of_slopes = _powers(u, E)
            weights += tl.sum(of_weights, 1)
            slopes += tl.sum(of_slopes, 1)
            _mark(mark, number, _any(u))
    tl.debug_barrier()
    return weights, slopes


@triton.jit
def _product(
    sight, m, tau, v, v_stride, value_channels, first, count, marks, per_mark, number,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Weights times values [M, V] and the sums of the weights [M]; marks blocks with weight."""
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    length = sight[9]
    for back in range(count):
        block = first + count - 1 - back
        mark = marks + block // per_mark
        if tl.load(mark) >= number:
            x, _ = _scores(sight, block, E, BLOCK_D, BLOCK_N)
            weights, _ = _powers(tl.maximum(x - m[:, None] - tau[:, None], 0.0), E)
            total += tl.sum(weights, 1)
            j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            values = _rows(v, j, v_stride, length, value_channels, BLOCK_V)
            result += _dot(weights.to(values.dtype), values)
            _mark(mark, tl.full([], WITH_WEIGHT, tl.int32), _any(weights))
    return result / total[:, None], total


@triton.jit
def forward(
    q, k, v, output, largest, threshold, sums, marks, starts, q_strides, k_strides, v_strides,
    slopes, documents, scale, window, heads, share, queries, keys, channels, value_channels,
    per_mark, number_of_marks, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output, largest x, threshold and sum of the weights of a tile of queries; its marks."""
    tile, head = tl.program_id(0), tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    sight, rows = _sight(
        q, k, q_strides, k_strides, tile, batch, head, head // share, documents, slopes, scale,
        window, queries, keys, channels, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    marks += place * number_of_marks
    v = _of_head(v, v_strides, batch, head // share)
    first = tl.load(starts + place) // BLOCK_N
    count = (tl.max(rows, 0) + keys - queries) // BLOCK_N + 1 - first
    m = _largest(sight, first, count, marks, per_mark, E, BLOCK_M, BLOCK_D, BLOCK_N)
    tau = tl.full([BLOCK_M], -1.0, tl.float32)
    number, step = tl.full([], 1, tl.int32), tl.full([], 1.0, tl.float32)
    while (step > LAST_STEP) & (number <= MOST_STEPS):
        number += 1
        of_weights, of_slopes = _sums(
            sight, m, tau, first, count, marks, per_mark, number, E, BLOCK_D, BLOCK_N
        )
        steps = _newton(of_weights, of_slopes, E)
        tau += steps
        step = tl.max(steps, 0)
    result, total = _product(
        sight, m, tau, v, v_strides[2], value_channels, first, count, marks, per_mark, number,
        E, BLOCK_M, BLOCK_D, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    at = tl.program_id(1).to(tl.int64) * queries + rows
    inside = tile * BLOCK_M + tl.arange(0, BLOCK_M) < queries
    tl.store(largest + at, m, mask=inside)
    tl.store(threshold + at, tau, mask=inside)
    tl.store(sums + at, total, mask=inside)
    _write(output, result, at, inside, value_channels, BLOCK_V)


@triton.jit
def _write(x, values, rows, inside, channels, SIZE: tl.constexpr):
    """Rows of a dense matrix of `channels` columns."""
    c = tl.arange(0, SIZE)
    keep = inside[:, None] & (c < channels)[None, :]
    at = rows.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=keep)


# ---- backward ------------------------------------------------------------------------------------


@triton.jit
def _again(sight, m, tau, total, block, inside, E: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """Weights, their slopes s [M, N] and the keys [N, D]; nothing for rows beyond the last."""
    x, keys = _scores(sight, block, E, BLOCK_D, BLOCK_N)
    u = tl.where(inside[:, None], tl.maximum(x - m[:, None] - tau[:, None], 0.0), 0.0)
    weights, slopes = _powers(u, E)
    return weights / total[:, None], slopes, keys


@triton.jit
def backward_queries(
    q, k, v, grad, dq, largest, threshold, sums, mean, marks, starts,
    q_strides, k_strides, v_strides, grad_strides,
    slopes, documents, scale, window, heads, share, queries, keys, channels, value_channels,
    per_mark, number_of_marks, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Delta and dQ of a tile of queries."""
    tile, head = tl.program_id(0), tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    sight, rows = _sight(
        q, k, q_strides, k_strides, tile, batch, head, head // share, documents, slopes, scale,
        window, queries, keys, channels, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    marks += place * number_of_marks
    v = _of_head(v, v_strides, batch, head // share)
    grad = _of_head(grad, grad_strides, batch, head)
    grads = _rows(grad, rows, grad_strides[2], queries, value_channels, BLOCK_V)
    at = tl.program_id(1).to(tl.int64) * queries + rows
    m, tau, total = tl.load(largest + at), tl.load(threshold + at), tl.load(sums + at)
    inside = tile * BLOCK_M + tl.arange(0, BLOCK_M) < queries
    first = tl.load(starts + place) // BLOCK_N
    last = (tl.max(rows, 0) + keys - queries) // BLOCK_N
    products, slope_sums = tl.zeros_like(m), tl.zeros_like(m)
    for block in range(first, last + 1):
        if tl.load(marks + block // per_mark) == WITH_WEIGHT:
            _, s, _ = _again(sight, m, tau, total, block, inside, E, BLOCK_D, BLOCK_N)
            j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            values = _rows(v, j, v_strides[2], keys, value_channels, BLOCK_V)
            products += tl.sum(s * _dot(grads, tl.trans(values)), 1)
            slope_sums += tl.sum(s, 1)
    delta = tl.where(inside, products / slope_sums, 0.0)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(first, last + 1):
        if tl.load(marks + block // per_mark) == WITH_WEIGHT:
            _, s, own = _again(sight, m, tau, total, block, inside, E, BLOCK_D, BLOCK_N)
            j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            values = _rows(v, j, v_strides[2], keys, value_channels, BLOCK_V)
            weight_grads = _dot(grads, tl.trans(values))
            score_grads = s * (weight_grads - delta[:, None])
            result += _dot(score_grads.to(own.dtype), own)
    tl.store(mean + at, delta, mask=inside)
    _write(dq, result * scale, at, inside, channels, BLOCK_D)


@triton.jit
def backward_keys(
    q, k, v, grad, dk, dv, largest, threshold, sums, mean, marks, ends,
    q_strides, k_strides, v_strides, grad_strides,
    slopes, documents, scale, window, heads, share, queries, keys, channels, value_channels,
    per_mark, number_of_marks, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys, over the queries of all heads that share them."""
    block, groups = tl.program_id(0), heads // share
    batch, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    v = _of_head(v, v_strides, batch, group)
    values = _rows(v, j, v_strides[2], keys, value_channels, BLOCK_V)
    of_keys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    of_values = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    tiles = tl.cdiv(queries, BLOCK_M)
    first = tl.maximum(block * BLOCK_N - (keys - queries), 0) // BLOCK_M
    for number in range(share):
        head = group * share + number
        of_head = batch * heads + head
        last = tl.load(ends + of_head * number_of_marks + block // per_mark)
        for tile in range(first, last):
            place = (of_head * tiles + tile) * number_of_marks + block // per_mark
            if tl.load(marks + place) == WITH_WEIGHT:
                sight, rows = _sight(
                    q, k, q_strides, k_strides, tile, batch, head, group, documents, slopes,
                    scale, window, queries, keys, channels, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                at = of_head * queries + rows
                m, tau, total = tl.load(largest + at), tl.load(threshold + at), tl.load(sums + at)
                inside = tile * BLOCK_M + tl.arange(0, BLOCK_M) < queries
                weights, s, _ = _again(sight, m, tau, total, block, inside, E, BLOCK_D, BLOCK_N)
                of_rows = _of_head(grad, grad_strides, batch, head)
                grads = _rows(of_rows, rows, grad_strides[2], queries, value_channels, BLOCK_V)
                of_values += _dot(tl.trans(weights.to(grads.dtype)), grads)
                weight_grads = _dot(grads, tl.trans(values))
                score_grads = s * (weight_grads - tl.load(mean + at)[:, None])
                tile_queries = sight[0]
                of_keys += _dot(tl.trans(score_grads.to(tile_queries.dtype)), tile_queries)
    at = tl.program_id(1).to(tl.int64) * keys + j
    _write(dk, of_keys * scale, at, j < keys, channels, BLOCK_D)
    _write(dv, of_values, at, j < keys, value_channels, BLOCK_V)
