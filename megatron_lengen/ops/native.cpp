// RMSNorm with affine dropout on the CPU, one row in cache at a time.
//
// Rows are the flattened [s, b] of a [s, b, d] tensor. All arithmetic is fp32; 16-bit inputs are
// rounded where Hugging Face's RMSNorm rounds (after the normalization, after the gain). The mask
// is Philox4x32-10 of the element's coordinates (see mask.py), recomputed wherever it is needed.
//
// Each function comes as NAME_f32 and NAME_bf16; `Call` mirrors the ctypes structure in native.py.

#include <cmath>
#include <vector>

#include "native_common.h"

namespace {

constexpr int LANES = 16;  // Philox calls computed side by side
constexpr int VALUES = 8;  // 16-bit values per call

using Words = uint32_t __attribute__((vector_size(16)));
using Pairs = uint64_t __attribute__((vector_size(16)));

struct Call {
    int64_t rows, d, batch, first_channel, blocks;
    uint64_t key;
    uint32_t stream, threshold;  // threshold 0: no mask
    int32_t normalize, threads;
    float eps;
    const int64_t *positions, *samples;  // [s], [b]
    const void *x, *dz;                  // [rows, d]
    const float *gain;                   // [d], null for ones
    void *out;                           // [rows, d]: z or dx, in `statistics` x + residual
    float *rstd, *mean, *variance;       // [rows]
    const float *alpha, *beta;           // [rows]
    const float *mean_grad, *variance_grad;  // [rows], null when the coefficients are constants
    float *gain_grad;                        // [blocks, d], null without a gain
    float *alpha_grad, *beta_grad;           // [rows]
    const void *residual, *total_grad;       // [rows, d] or null
};

// The row's 16-bit mask values, for channels first_channel .. first_channel + d - 1.
class MaskRow {
  public:
    explicit MaskRow(const Call &call)
        : call_(call), first_(call.first_channel / VALUES),
          skip_(call.first_channel - first_ * VALUES),
          calls_((call.first_channel + call.d + VALUES - 1) / VALUES - first_),
          words_((calls_ + LANES) * 4) {}

    const uint16_t *fill(int64_t row) {
        const uint32_t position = uint32_t(call_.positions[row / call_.batch]);
        const uint32_t sample = uint32_t(call_.samples[row % call_.batch]);
        for (int64_t start = 0; start < calls_; start += LANES)
            philox(uint32_t(first_ + start), position, sample, &words_[start * 4]);
        return reinterpret_cast<const uint16_t *>(words_.data()) + skip_;
    }

  private:
    void philox(uint32_t first, uint32_t position, uint32_t sample, uint32_t *out) const {
        uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
        for (int i = 0; i < LANES; ++i) {
            c0[i] = first + i;
            c1[i] = position;
            c2[i] = sample;
            c3[i] = call_.stream;
        }
        uint32_t k0 = uint32_t(call_.key), k1 = uint32_t(call_.key >> 32);
        for (int round = 0; round < 10; ++round) {
            for (int i = 0; i < LANES; ++i) {
                const uint64_t p0 = uint64_t(c0[i]) * 0xD2511F53u;
                const uint64_t p1 = uint64_t(c2[i]) * 0xCD9E8D57u;
                c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
                c1[i] = uint32_t(p1);
                c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
                c3[i] = uint32_t(p0);
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        interleave(c0, c1, c2, c3, out);
    }

    // out = c0[0] c1[0] c2[0] c3[0] c0[1] ... in whole vectors: narrow or scattered stores would
    // stall the wide loads that follow.
    static void interleave(const uint32_t *c0, const uint32_t *c1, const uint32_t *c2,
                           const uint32_t *c3, uint32_t *out) {
        for (int i = 0; i < LANES; i += 4) {
            Words a, b, c, d;
            std::memcpy(&a, c0 + i, sizeof a);
            std::memcpy(&b, c1 + i, sizeof b);
            std::memcpy(&c, c2 + i, sizeof c);
            std::memcpy(&d, c3 + i, sizeof d);
            const Pairs ab_low = (Pairs)__builtin_shufflevector(a, b, 0, 4, 1, 5);
            const Pairs ab_high = (Pairs)__builtin_shufflevector(a, b, 2, 6, 3, 7);
            const Pairs cd_low = (Pairs)__builtin_shufflevector(c, d, 0, 4, 1, 5);
            const Pairs cd_high = (Pairs)__builtin_shufflevector(c, d, 2, 6, 3, 7);
            const Pairs calls[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 2),
                                    __builtin_shufflevector(ab_low, cd_low, 1, 3),
                                    __builtin_shufflevector(ab_high, cd_high, 0, 2),
                                    __builtin_shufflevector(ab_high, cd_high, 1, 3)};
            std::memcpy(out + 4 * i, calls, sizeof calls);
        }
    }

    const Call &call_;
    int64_t first_, skip_, calls_;
    std::vector<uint32_t> words_;
};

// x_hat of one row into `hat`, and x / rms into `unit` where asked for.
template <typename T>
void normalize_row(const Call &call, const T *x, float rstd, float *hat, float *unit) {
    const int64_t d = call.d;
    for (int64_t i = 0; i < d; ++i) {
        const float u = call.normalize ? rounded(x, load(x + i) * rstd) : load(x + i);
        if (unit) unit[i] = u;
        hat[i] = call.gain ? rounded(x, u * call.gain[i]) : u;
    }
}

// 1 / rms of x, then mean and variance of x_hat, for every row.
template <typename T> void statistics(const Call &call) {
    const int64_t d = call.d;
    const T *x = static_cast<const T *>(call.x);
#pragma omp parallel num_threads(call.threads)
    {
        std::vector<float> hat(d);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < call.rows; ++row) {
            const T *xr = x + row * d;
            if (call.residual) {
                const T *added = static_cast<const T *>(call.residual) + row * d;
                T *total = static_cast<T *>(call.out) + row * d;
                for (int64_t i = 0; i < d; ++i) store(total + i, load(xr + i) + load(added + i));
                xr = total;
            }
            float rstd = 1.0f;
            if (call.normalize) {
                float square = 0.0f;
#pragma omp simd reduction(+ : square)
                for (int64_t i = 0; i < d; ++i) square += load(xr + i) * load(xr + i);
                rstd = 1.0f / std::sqrt(square / float(d) + call.eps);
                call.rstd[row] = rstd;
            }
            if (!call.mean) continue;
            normalize_row(call, xr, rstd, hat.data(), nullptr);
            float sum = 0.0f, rest = 0.0f, centred = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < d; ++i) sum += hat[i];
            const float rough = sum / float(d);
            // The rounding of `sum`, so that a constant row has exactly its mean and no variance.
#pragma omp simd reduction(+ : rest)
            for (int64_t i = 0; i < d; ++i) rest += hat[i] - rough;
            const float mean = rough + rest / float(d);
#pragma omp simd reduction(+ : centred)
            for (int64_t i = 0; i < d; ++i) centred += (hat[i] - mean) * (hat[i] - mean);
            call.mean[row] = mean;
            call.variance[row] = centred / float(d);
        }
    }
}

// z = alpha * b * x_hat + beta, or x_hat itself without a mask.
template <typename T> void forward(const Call &call) {
    const int64_t d = call.d;
    const T *x = static_cast<const T *>(call.x);
    T *out = static_cast<T *>(call.out);
#pragma omp parallel num_threads(call.threads)
    {
        std::vector<float> hat(d);
        MaskRow mask(call);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < call.rows; ++row) {
            T *z = out + row * d;
            normalize_row(call, x + row * d, call.normalize ? call.rstd[row] : 1.0f, hat.data(),
                          nullptr);
            if (!call.threshold) {
                for (int64_t i = 0; i < d; ++i) store(z + i, hat[i]);
                continue;
            }
            const uint16_t *values = mask.fill(row);
            const float alpha = call.alpha[row], beta = call.beta[row];
            const uint32_t threshold = call.threshold;
            for (int64_t i = 0; i < d; ++i)
                store(z + i, (values[i] >= threshold ? alpha * hat[i] : 0.0f) + beta);
        }
    }
}

// d loss / d alpha and d loss / d beta of every row.
template <typename T> void coefficient_grads(const Call &call) {
    const int64_t d = call.d;
    const T *x = static_cast<const T *>(call.x), *dz = static_cast<const T *>(call.dz);
#pragma omp parallel num_threads(call.threads)
    {
        std::vector<float> hat(d);
        MaskRow mask(call);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < call.rows; ++row) {
            const T *g = dz + row * d;
            normalize_row(call, x + row * d, call.normalize ? call.rstd[row] : 1.0f, hat.data(),
                          nullptr);
            const uint16_t *values = mask.fill(row);
            const uint32_t threshold = call.threshold;
            float alpha = 0.0f, beta = 0.0f;
#pragma omp simd reduction(+ : alpha, beta)
            for (int64_t i = 0; i < d; ++i) {
                const float gradient = load(g + i);
                alpha += values[i] >= threshold ? gradient * hat[i] : 0.0f;
                beta += gradient;
            }
            call.alpha_grad[row] = alpha;
            call.beta_grad[row] = beta;
        }
    }
}

// dx of one row; adds the row's share of the gain's gradient to `gain_grad`.
template <typename T>
void backward_row(const Call &call, int64_t row, MaskRow &mask, float *unit, float *hat,
                  float *gain_grad) {
    const int64_t d = call.d;
    const T *x = static_cast<const T *>(call.x) + row * d;
    const T *dz = static_cast<const T *>(call.dz) + row * d;
    T *dx = static_cast<T *>(call.out) + row * d;
    const float rstd = call.normalize ? call.rstd[row] : 1.0f;
    normalize_row(call, x, rstd, hat, unit);
    // From here on `hat` holds the gradient at x_hat.
    const float scale = call.mean_grad ? 2.0f * call.variance_grad[row] / float(d) : 0.0f;
    const float mean = call.mean_grad ? call.mean[row] : 0.0f;
    const float shift = call.mean_grad ? call.mean_grad[row] / float(d) : 0.0f;
    if (call.threshold) {
        const uint16_t *values = mask.fill(row);
        const uint32_t threshold = call.threshold;
        const float alpha = call.alpha[row];
        for (int64_t i = 0; i < d; ++i)
            hat[i] = (values[i] >= threshold ? alpha * load(dz + i) : 0.0f) + shift +
                     scale * (hat[i] - mean);
    } else {
        for (int64_t i = 0; i < d; ++i) hat[i] = load(dz + i);
    }
    if (gain_grad)
        for (int64_t i = 0; i < d; ++i) gain_grad[i] += hat[i] * unit[i];
    if (!call.normalize) {
        for (int64_t i = 0; i < d; ++i) store(dx + i, hat[i]);
        return;
    }
    const T *above = call.total_grad ? static_cast<const T *>(call.total_grad) + row * d : nullptr;
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < d; ++i) {
        hat[i] *= call.gain ? call.gain[i] : 1.0f;
        dot += hat[i] * unit[i];
    }
    dot /= float(d);
    for (int64_t i = 0; i < d; ++i)
        store(dx + i, rstd * (hat[i] - unit[i] * dot) + (above ? load(above + i) : 0.0f));
}

// dx, and the gain's gradient as one partial sum per block of rows: the blocks do not depend on
// the number of threads, so neither does the result.
template <typename T> void backward(const Call &call) {
#pragma omp parallel num_threads(call.threads)
    {
        std::vector<float> unit(call.d), hat(call.d);
        MaskRow mask(call);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < call.blocks; ++block) {
            float *gain_grad = call.gain_grad ? call.gain_grad + block * call.d : nullptr;
            if (gain_grad) std::memset(gain_grad, 0, size_t(call.d) * sizeof(float));
            const int64_t first = call.rows * block / call.blocks;
            const int64_t last = call.rows * (block + 1) / call.blocks;
            for (int64_t row = first; row < last; ++row)
                backward_row<T>(call, row, mask, unit.data(), hat.data(), gain_grad);
        }
    }
}

}  // namespace

#define EXPORT(name)                                                          \
    extern "C" void lengen_##name##_f32(const Call *call) { name<float>(*call); } \
    extern "C" void lengen_##name##_bf16(const Call *call) { name<Bf16>(*call); }

EXPORT(statistics)
EXPORT(forward)
EXPORT(coefficient_grads)
EXPORT(backward)
