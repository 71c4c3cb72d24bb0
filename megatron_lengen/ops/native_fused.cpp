// SwiGLU and rotary positions on the CPU, each in one pass over memory. All arithmetic is fp32.
//
// Each function comes as NAME_f32 and NAME_bf16; `Glu` and `Rotary` mirror the ctypes structures in
// swiglu.py and rotary.py.


#include "native_common.h"

namespace {

struct Glu {
    int64_t rows, width;  // of the result
    int64_t threads;
    const void *x;   // [rows, 2 width]: gate, up
    const void *dz;  // [rows, width], null forward
    void *out;       // forward z [rows, width], backward dx [rows, 2 width]
};

// z = gate * sigmoid(gate) * up
template <typename T> void swiglu(const Glu &call) {
    const int64_t f = call.width;
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t row = 0; row < call.rows; ++row) {
        const T *gate = static_cast<const T *>(call.x) + row * 2 * f, *up = gate + f;
        T *z = static_cast<T *>(call.out) + row * f;
#pragma omp simd
        for (int64_t i = 0; i < f; ++i) {
            const float g = load(gate + i);
            store(z + i, g / (1.0f + exp_of(-g)) * load(up + i));
        }
    }
}

template <typename T> void swiglu_backward(const Glu &call) {
    const int64_t f = call.width;
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t row = 0; row < call.rows; ++row) {
        const T *gate = static_cast<const T *>(call.x) + row * 2 * f, *up = gate + f;
        const T *dz = static_cast<const T *>(call.dz) + row * f;
        T *dgate = static_cast<T *>(call.out) + row * 2 * f, *dup = dgate + f;
#pragma omp simd
        for (int64_t i = 0; i < f; ++i) {
            const float g = load(gate + i), d = load(dz + i);
            const float share = 1.0f / (1.0f + exp_of(-g));
            store(dup + i, d * g * share);
            store(dgate + i, d * load(up + i) * share * (1.0f + g * (1.0f - share)));
        }
    }
}

struct Rotary {
    int64_t tokens, rows, heads, width, turned;  // turned: channels that rotate, an even number
    int64_t x_token, x_row, x_head;              // strides
    int64_t threads;
    float direction;           // 1, or -1 for the gradient
    const void *x;             // [tokens, rows, heads, width]
    const float *cosine, *sine;  // [tokens, turned / 2]
    void *out;                 // as x, contiguous
};

// (a, b) -> (a cos - b sin, b cos + a sin) for channels i and i + turned / 2.
template <typename T> void rotate(const Rotary &call) {
    const int64_t half = call.turned / 2;
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t token = 0; token < call.tokens; ++token) {
        const float *cosine = call.cosine + token * half, *sine = call.sine + token * half;
        for (int64_t row = 0; row < call.rows; ++row)
            for (int64_t head = 0; head < call.heads; ++head) {
                const T *x = static_cast<const T *>(call.x) + token * call.x_token +
                             row * call.x_row + head * call.x_head;
                T *z = static_cast<T *>(call.out) +
                       ((token * call.rows + row) * call.heads + head) * call.width;
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = load(x + i), b = load(x + half + i);
                    const float s = call.direction * sine[i];
                    store(z + i, a * cosine[i] - b * s);
                    store(z + half + i, b * cosine[i] + a * s);
                }
                std::memcpy(z + call.turned, x + call.turned,
                            (call.width - call.turned) * sizeof(T));
            }
    }
}

}  // namespace

#define EXPORT(name, Call)                                                    \
    extern "C" void lengen_##name##_f32(const Call *call) { name<float>(*call); } \
    extern "C" void lengen_##name##_bf16(const Call *call) { name<Bf16>(*call); }

EXPORT(swiglu, Glu)
EXPORT(swiglu_backward, Glu)
EXPORT(rotate, Rotary)
