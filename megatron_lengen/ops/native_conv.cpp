// Mamba's short convolution on the CPU: depthwise, causal, SiLU behind it, channels last.
//
// Work is shared out in blocks of tokens of one row, whose number depends on the sizes alone; each
// writes its own partial sums of the weights' gradients. All arithmetic is fp32.
//
// Each function comes as NAME_f32 and NAME_bf16; `Call` mirrors the ctypes structure in
// causal_conv_native.py.

#include <algorithm>
#include <vector>

#include "native_common.h"

namespace {

struct Call {
    int64_t rows, tokens, channels, taps, block, threads;
    int64_t x_row, x_token, dy_row, dy_token;  // strides
    int32_t silu;
    const void *x;              // [rows, tokens, channels]
    const float *weight, *bias; // [taps, channels], [channels]
    const float *before;        // [rows, taps - 1, channels]: inputs before the first token
    const int32_t *reach;       // [rows, tokens]: earlier inputs in a token's document, or null
    void *y;                    // as x, contiguous
    const void *dy;             // as x
    void *dx;                   // as y
    float *dweight, *dbias;     // [rows, blocks, taps, channels], [rows, blocks, channels]
    float *dbefore;             // as `before`
};

template <typename T> class Block {
  public:
    explicit Block(const Call &call)
        : call_(call), d_(call.channels), w_(call.taps), pre_(d_), grads_(w_ * d_),
          inputs_(w_ * d_) {}

    void forward(int64_t row, int64_t first, int64_t last) {
        row_ = row;
        for (int64_t t = first - w_ + 1; t < first; ++t) take(t);
        T *y = static_cast<T *>(call_.y) + (row * call_.tokens + first) * d_;
        for (int64_t t = first; t < last; ++t, y += d_) {
            take(t);
            convolve(t);
            const float *pre = pre_.data();
            if (call_.silu)
                for (int64_t i = 0; i < d_; ++i) store(y + i, pre[i] / (1.0f + exp_of(-pre[i])));
            else
                for (int64_t i = 0; i < d_; ++i) store(y + i, pre[i]);
        }
    }

    // dx of the tokens first .. last - 1, which tokens up to w - 1 later read, too; the weights'
    // gradients of the block's own tokens only. The first block goes on before the row.
    void backward(int64_t row, int64_t block, int64_t first, int64_t last) {
        row_ = row;
        const int64_t blocks = (call_.tokens + call_.block - 1) / call_.block;
        float *dweight = call_.dweight + (row * blocks + block) * w_ * d_;
        float *dbias = call_.dbias + (row * blocks + block) * d_;
        std::memset(dweight, 0, w_ * d_ * sizeof(float));
        std::memset(dbias, 0, d_ * sizeof(float));
        std::fill(grads_.begin(), grads_.end(), 0.0f);
        const int64_t begin = first ? first : 1 - w_;
        for (int64_t t = first - w_ + 1; t < first; ++t) take(t);
        const int64_t end = std::min(last + w_ - 1, call_.tokens);
        for (int64_t t = first; t < last + w_ - 1; ++t) {
            if (t < end) {
                take(t);
                convolve(t);
                gradient(t);
                spread(t, t < last ? dweight : nullptr, t < last ? dbias : nullptr);
            }
            const int64_t done = t - w_ + 1;  // no later token reads it
            if (done >= begin && done < last) give(done);
            clear(done);
        }
    }

  private:
    float *ring(std::vector<float> &of, int64_t t) { return &of[(t + w_) % w_ * d_]; }

    // The input of token t into the ring.
    void take(int64_t t) {
        float *in = ring(inputs_, t);
        if (t < 0) {
            std::memcpy(in, call_.before + (row_ * (w_ - 1) + t + w_ - 1) * d_, d_ * sizeof(float));
            return;
        }
        const T *x = static_cast<const T *>(call_.x) + row_ * call_.x_row + t * call_.x_token;
        for (int64_t i = 0; i < d_; ++i) in[i] = load(x + i);
    }

    int64_t reach(int64_t t) const {
        return call_.reach ? call_.reach[row_ * call_.tokens + t] : w_ - 1;
    }

    void convolve(int64_t t) {
        float *pre = pre_.data();
        const int64_t reach_of = reach(t);
        if (w_ == 4 && reach_of == 3) {
            const float *x0 = ring(inputs_, t), *x1 = ring(inputs_, t - 1);
            const float *x2 = ring(inputs_, t - 2), *x3 = ring(inputs_, t - 3);
            const float *w = call_.weight, *bias = call_.bias;
            for (int64_t i = 0; i < d_; ++i)
                pre[i] = bias[i] + w[i] * x3[i] + w[d_ + i] * x2[i] + w[2 * d_ + i] * x1[i] +
                         w[3 * d_ + i] * x0[i];
            return;
        }
        std::memcpy(pre, call_.bias, d_ * sizeof(float));
        for (int64_t back = reach_of; back >= 0; --back) {
            const float *x = ring(inputs_, t - back), *w = call_.weight + (w_ - 1 - back) * d_;
            for (int64_t i = 0; i < d_; ++i) pre[i] += w[i] * x[i];
        }
    }

    // From the output's gradient to that before SiLU, in place of pre_.
    void gradient(int64_t t) {
        const T *dy = static_cast<const T *>(call_.dy) + row_ * call_.dy_row + t * call_.dy_token;
        float *pre = pre_.data();
        if (!call_.silu) {
            for (int64_t i = 0; i < d_; ++i) pre[i] = load(dy + i);
            return;
        }
        for (int64_t i = 0; i < d_; ++i) {
            const float gate = 1.0f / (1.0f + exp_of(-pre[i]));
            pre[i] = load(dy + i) * gate * (1.0f + pre[i] * (1.0f - gate));
        }
    }

    void spread(int64_t t, float *dweight, float *dbias) {
        const float *grad = pre_.data();
        for (int64_t back = reach(t); back >= 0; --back) {
            const int64_t tap = w_ - 1 - back;
            const float *x = ring(inputs_, t - back), *w = call_.weight + tap * d_;
            float *dx = ring(grads_, t - back);
            for (int64_t i = 0; i < d_; ++i) dx[i] += w[i] * grad[i];
            if (dweight)
                for (int64_t i = 0; i < d_; ++i) dweight[tap * d_ + i] += x[i] * grad[i];
        }
        if (dbias)
            for (int64_t i = 0; i < d_; ++i) dbias[i] += grad[i];
    }

    void give(int64_t t) {
        const float *grad = ring(grads_, t);
        if (t < 0) {
            std::memcpy(call_.dbefore + (row_ * (w_ - 1) + t + w_ - 1) * d_, grad,
                        d_ * sizeof(float));
            return;
        }
        T *dx = static_cast<T *>(call_.dx) + (row_ * call_.tokens + t) * d_;
        for (int64_t i = 0; i < d_; ++i) store(dx + i, grad[i]);
    }

    void clear(int64_t t) { std::memset(ring(grads_, t), 0, d_ * sizeof(float)); }

    const Call &call_;
    const int64_t d_, w_;
    int64_t row_ = 0;
    std::vector<float> pre_, grads_, inputs_;
};

template <typename T, typename Do> void run(const Call &call, Do act) {
    const int64_t blocks = (call.tokens + call.block - 1) / call.block;
#pragma omp parallel num_threads(int(call.threads))
    {
        Block<T> work(call);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < call.rows * blocks; ++unit) {
            const int64_t block = unit % blocks, first = block * call.block;
            act(work, unit / blocks, block, first, std::min(first + call.block, call.tokens));
        }
    }
}

template <typename T> void conv_forward(const Call &call) {
    run<T>(call, [](Block<T> &work, int64_t row, int64_t, int64_t first, int64_t last) {
        work.forward(row, first, last);
    });
}

template <typename T> void conv_backward(const Call &call) {
    run<T>(call, [](Block<T> &work, int64_t row, int64_t block, int64_t first, int64_t last) {
        work.backward(row, block, first, last);
    });
}

}  // namespace

#define EXPORT(name)                                                              \
    extern "C" void lengen_##name##_f32(const Call *call) { name<float>(*call); } \
    extern "C" void lengen_##name##_bf16(const Call *call) { name<Bf16>(*call); }

EXPORT(conv_forward)
EXPORT(conv_backward)
