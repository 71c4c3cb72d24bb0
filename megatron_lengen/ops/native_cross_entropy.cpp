// Softmax and cross-entropy of rows of logits on the CPU: each row's maximum, sum of exponentials
// and label's logit; then, in place of the logits, the gradient of factor * loss.
//
// A row is read again while it is in cache. Rows are shared out over the threads; what is computed
// for a row does not depend on them. All arithmetic is fp32, sums over a row are double.
//
// Each function comes as NAME_f32 and NAME_bf16; `Call` mirrors the ctypes structure in
// linear_cross_entropy_native.py.

#include <algorithm>
#include <limits>

#include "native_common.h"

namespace {

struct Call {
    int64_t rows, columns, row, threads;  // row: from one row of logits to the next
    void *logits;                         // [rows, columns]
    const int64_t *labels;                // [rows]; any number outside 0 .. columns - 1 is no label
    const float *factors;                 // [rows]
    float *largest, *sum, *label;         // [rows]: statistics
};

constexpr int64_t BLOCK = 1024;  // columns whose exponentials add up in fp32
constexpr int LANES = 64;        // sums beside each other

// Not a number where a logit is none: the sum, not the maximum, carries it.
template <typename T> float largest_of(const T *x, int64_t columns) {
    float lanes[LANES], largest = -std::numeric_limits<float>::infinity();
    std::fill(lanes, lanes + LANES, largest);
    int64_t j = 0;
    for (; j + LANES <= columns; j += LANES)
        for (int i = 0; i < LANES; ++i) {
            const float value = load(x + j + i);
            lanes[i] = value > lanes[i] ? value : lanes[i];
        }
    for (; j < columns; ++j) largest = std::max(largest, load(x + j));
    for (float lane : lanes) largest = std::max(largest, lane);
    return largest;
}

template <typename T> float sum_of(const T *x, int64_t columns, float largest) {
    double total = 0.0;
    for (int64_t first = 0; first < columns; first += BLOCK) {
        const int64_t last = std::min(first + BLOCK, columns);
        float lanes[LANES] = {};
        int64_t j = first;
        for (; j + LANES <= last; j += LANES)
            for (int i = 0; i < LANES; ++i) lanes[i] += exp_of(load(x + j + i) - largest);
        for (; j < last; ++j) lanes[0] += exp_of(load(x + j) - largest);
        for (float lane : lanes) total += lane;
    }
    return float(total);
}

inline bool here(const Call &call, int64_t row) {
    return call.labels[row] >= 0 && call.labels[row] < call.columns;
}

template <typename T> void measure(const Call &call, int64_t row) {
    const T *x = static_cast<const T *>(call.logits) + row * call.row;
    call.largest[row] = largest_of(x, call.columns);
    call.sum[row] = sum_of(x, call.columns, call.largest[row]);
    call.label[row] = here(call, row) ? load(x + call.labels[row]) : 0.0f;
}

template <typename T> void differentiate(const Call &call, int64_t row) {
    T *x = static_cast<T *>(call.logits) + row * call.row;
    const float largest = call.largest[row], factor = call.factors[row];
    const float scale = factor / call.sum[row];
    const float label = here(call, row) ? load(x + call.labels[row]) : 0.0f;
    for (int64_t j = 0; j < call.columns; ++j) store(x + j, scale * exp_of(load(x + j) - largest));
    if (here(call, row))
        store(x + call.labels[row], factor * (exp_of(label - largest) / call.sum[row] - 1.0f));
}

template <typename Do> void for_rows(const Call &call, Do act) {
#pragma omp parallel for num_threads(int(call.threads)) schedule(static)
    for (int64_t row = 0; row < call.rows; ++row) act(row);
}

template <typename T> void logits_measure(const Call &call) {
    for_rows(call, [&](int64_t row) { measure<T>(call, row); });
}

template <typename T> void logits_differentiate(const Call &call) {
    for_rows(call, [&](int64_t row) { differentiate<T>(call, row); });
}

// Both in turn, where a row is a whole one.
template <typename T> void logits_both(const Call &call) {
    for_rows(call, [&](int64_t row) {
        measure<T>(call, row);
        differentiate<T>(call, row);
    });
}

}  // namespace

#define EXPORT(name)                                                              \
    extern "C" void lengen_##name##_f32(const Call *call) { name<float>(*call); } \
    extern "C" void lengen_##name##_bf16(const Call *call) { name<Bf16>(*call); }

EXPORT(logits_measure)
EXPORT(logits_differentiate)
EXPORT(logits_both)
