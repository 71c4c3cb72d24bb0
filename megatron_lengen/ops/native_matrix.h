// Products of small matrices in cache, for native_ssd.cpp and native_attention.cpp. All sizes are
// multiples of 16 (rows of results: of 8); rows lie one behind the other unless a stride is given.

#pragma once

#include <cstdint>
#include <cstring>

constexpr int LANE = 16;
// Numbers of a register, and the part of a product that the sums in registers are of.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, TILE_ROWS = 8, TILE_COLUMNS = 32;
#elif defined(__AVX__)
constexpr int WIDTH = 8, TILE_ROWS = 4, TILE_COLUMNS = 16;
#else
constexpr int WIDTH = 4, TILE_ROWS = 2, TILE_COLUMNS = 16;
#endif
using Lanes = float __attribute__((vector_size(WIDTH * sizeof(float))));

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

template <int ROWS, int COLUMNS>
inline void product_tile(const Left &a, const float *b, int64_t b_row, float *c, int64_t c_row,
                         int64_t first, int64_t last, const float *keep) {
    constexpr int VECTORS = COLUMNS / WIDTH;
    Lanes sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < VECTORS; ++v)
            sum[i][v] = keep ? keep[i] * lanes_at(c + i * c_row + v * WIDTH) : Lanes{};
    for (int64_t k = first; k < last; ++k) {
        Lanes right[VECTORS];
        for (int v = 0; v < VECTORS; ++v) right[v] = lanes_at(b + k * b_row + v * WIDTH);
        for (int i = 0; i < ROWS; ++i) {
            const float left = a.at[i * a.row + k * a.column];
            for (int v = 0; v < VECTORS; ++v) sum[i][v] += left * right[v];
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < VECTORS; ++v)
            std::memcpy(c + i * c_row + v * WIDTH, &sum[i][v], sizeof(Lanes));
}

// c = keep[i] * c + a b for [m, depth] times [depth, n]; no keep: c = a b.
// Not inlined: its tiles are long, and it is called from many places.
inline __attribute__((noinline)) void product(Form form, int64_t m, int64_t n, int64_t depth,
                                              Left a, const float *b, int64_t b_row, float *c,
                                              int64_t c_row, const float *keep) {
    for (int64_t j = 0; j < n;) {
        const int64_t wide = n - j >= TILE_COLUMNS ? TILE_COLUMNS : LANE;
        for (int64_t i = 0; i < m; i += TILE_ROWS) {
            if (form == Form::result_lower && j > i + TILE_ROWS - 1) continue;
            const int64_t first = form == Form::left_upper ? i : 0;
            const bool cut = form == Form::left_lower && i + TILE_ROWS < depth;
            const int64_t last = cut ? i + TILE_ROWS : depth;
            const Left part{a.at + i * a.row, a.row, a.column};
            float *out = c + i * c_row + j;
            const float *kept = keep ? keep + i : nullptr;
            auto *tile = wide == LANE ? product_tile<TILE_ROWS, LANE>
                                      : product_tile<TILE_ROWS, TILE_COLUMNS>;
            tile(part, b + j, b_row, out, c_row, first, last, kept);
        }
        j += wide;
    }
}

// out[j][i] = in[i][j]
inline void transpose(const float *in, int64_t rows, int64_t columns, float *out) {
    for (int64_t i = 0; i < rows; i += LANE)
        for (int64_t j = 0; j < columns; j += LANE)
            for (int64_t b = 0; b < LANE; ++b)
                for (int64_t a = 0; a < LANE; ++a)
                    out[(j + b) * rows + i + a] = in[(i + a) * columns + j + b];
}

inline float dot(const float *a, const float *b, int64_t size) {
    Lanes sum{};
    for (int64_t i = 0; i < size; i += WIDTH) sum += lanes_at(a + i) * lanes_at(b + i);
    float total = 0.0f;
    for (int i = 0; i < WIDTH; ++i) total += sum[i];
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
