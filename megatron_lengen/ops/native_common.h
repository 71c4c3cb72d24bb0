// What the kernels of native*.cpp share: 16-bit numbers, exp, products of small matrices.

#pragma once

#include <cstdint>
#include <cstring>

struct Bf16 {
    uint16_t bits;
};

inline float load(const float *p) { return *p; }
inline float load(const Bf16 *p) {
    uint32_t bits = uint32_t(p->bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float *p, float value) { *p = value; }
inline void store(Bf16 *p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
    uint32_t nan = (bits >> 16) | 0x40u;
    p->bits = uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}
inline float rounded(const float *, float value) { return value; }
inline float rounded(const Bf16 *, float value) {
    Bf16 half;
    store(&half, value);
    return load(&half);
}

// exp within 2 units in the last place, in a form that compilers vectorize: exp(x) = 2^k exp(r)
// with |r| <= ln(2) / 2 and a Taylor polynomial. 0 below -87, capped above 88.
inline float exp_of(float x) {
    const float inside = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float k = (inside * 1.44269504f + magic) - magic;
    const float r = (inside - k * 0.693359375f) + k * 2.12194440e-4f;
    float sum = 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const int32_t exponent = (int32_t(k) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, 4);
    return x < -87.0f ? 0.0f : sum * scale;
}

// ---- products of small matrices ------------------------------------------------------------------

constexpr int LANE = 16;  // all sizes are multiples of this
using Lanes = float __attribute__((vector_size(64)));

inline Lanes lanes_at(const float *p) {
    Lanes value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// Which numbers of the left matrix are known to be zero, or which of the result are not wanted.
enum class Form { full, left_lower, left_upper, result_lower };

struct Left {
    const float *at;
    int64_t row, column;  // strides: a transposed matrix is no other case
};

template <int ROWS, int VECTORS>
inline void product_tile(const Left &a, const float *b, int64_t b_row, float *c, int64_t c_row,
                         int64_t first, int64_t last, const float *keep) {
    Lanes sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < VECTORS; ++v)
            sum[i][v] = keep ? keep[i] * lanes_at(c + i * c_row + v * LANE) : Lanes{};
    for (int64_t k = first; k < last; ++k) {
        Lanes right[VECTORS];
        for (int v = 0; v < VECTORS; ++v) right[v] = lanes_at(b + k * b_row + v * LANE);
        for (int i = 0; i < ROWS; ++i) {
            const float left = a.at[i * a.row + k * a.column];
            for (int v = 0; v < VECTORS; ++v) sum[i][v] += left * right[v];
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < VECTORS; ++v)
            std::memcpy(c + i * c_row + v * LANE, &sum[i][v], sizeof(Lanes));
}

// c = keep[i] * c + a b for [m, k] times [k, n], all multiples of 16; no keep: c = a b.
inline void product(Form form, int64_t m, int64_t n, int64_t depth, Left a, const float *b,
                    int64_t b_row, float *c, int64_t c_row, const float *keep) {
#ifdef __AVX512F__
    constexpr int ROWS = 8, VECTORS = 2;  // 16 of 32 registers hold sums
#else
    constexpr int ROWS = 4, VECTORS = 1;
#endif
    for (int64_t j = 0; j < n;) {
        const int64_t wide = n - j >= VECTORS * LANE ? VECTORS * LANE : LANE;
        for (int64_t i = 0; i < m; i += ROWS) {
            if (form == Form::result_lower && j > i + ROWS - 1) continue;
            const int64_t first = form == Form::left_upper ? i : 0;
            const int64_t last = form == Form::left_lower && i + ROWS < depth ? i + ROWS : depth;
            const Left part{a.at + i * a.row, a.row, a.column};
            float *out = c + i * c_row + j;
            const float *kept = keep ? keep + i : nullptr;
            if (wide == LANE)
                product_tile<ROWS, 1>(part, b + j, b_row, out, c_row, first, last, kept);
            else
                product_tile<ROWS, VECTORS>(part, b + j, b_row, out, c_row, first, last, kept);
        }
        j += wide;
    }
}

// out[j][i] = in[i][j], multiples of 16.
inline void transpose(const float *in, int64_t rows, int64_t columns, float *out) {
    for (int64_t i = 0; i < rows; i += LANE)
        for (int64_t j = 0; j < columns; j += LANE)
            for (int64_t b = 0; b < LANE; ++b)
                for (int64_t a = 0; a < LANE; ++a)
                    out[(j + b) * rows + i + a] = in[(i + a) * columns + j + b];
}

// Of multiples of 16.
inline float dot(const float *a, const float *b, int64_t size) {
    Lanes sum{};
    for (int64_t i = 0; i < size; i += LANE) sum += lanes_at(a + i) * lanes_at(b + i);
    float total = 0.0f;
    for (int i = 0; i < LANE; ++i) total += sum[i];
    return total;
}

// out[i] = scale[i] * in[i] for rows of `width`.
inline void scale_rows(const float *in, const float *scale, int64_t rows, int64_t width,
                       float *out) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < width; ++j) out[i * width + j] = scale[i] * in[i * width + j];
}

// out[i][j] = in[i][j] * scale[j].
inline void scale_columns(const float *in, const float *scale, int64_t rows, int64_t width,
                          float *out) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < width; ++j) out[i * width + j] = in[i * width + j] * scale[j];
}
