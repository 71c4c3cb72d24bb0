// The state space recurrence of Mamba2 on the CPU: what ssd_chunks.py computes, a chunk of one head
// in cache at a time. Sums are fp32; decays' exponents are added in double.
//
// A unit of work is some heads of one group in one row of the batch, over all its tokens: how the
// work is shared out depends on the sizes alone, so the result does not depend on the threads.
// Sizes are padded with zeros to multiples of 16 in scratch memory, so no product has edges.
//
// `Call` mirrors the ctypes structure in ssd_native.py.

#include <algorithm>
#include <vector>

#include "native_common.h"
#include "native_decays.h"
#include "native_matrix.h"

namespace {

constexpr int64_t SEGMENT = 16;  // chunks between two states that forward keeps

struct Call {
    int64_t rows, tokens, groups, heads, channels, state, heads_of_unit, threads;  // heads: all
    int64_t half;  // whether x, b, c, y, dy and dx are bf16
    int64_t x_row, x_token, b_row, b_token, c_row, c_token, dy_row, dy_token;      // strides
    const void *x, *b, *c;     // [rows, tokens, heads, channels], [rows, tokens, groups, state]
    const float *dt, *a, *d;   // [rows, tokens, heads], [heads], [heads] or null
    const int32_t *documents;  // [rows, tokens], growing, or null
    const float *initial;      // [rows, heads, channels, state], or null for zeros
    void *y;                   // [rows, tokens, heads, channels]
    float *final;              // as `initial`, or null where nobody asks
    float *kept;               // [rows, heads, segments, padded state, padded channels], or null
    const void *dy;            // as y
    const float *dfinal;       // as `initial`, or null for zeros
    void *dx;                  // as y
    float *ddt;                // as dt
    float *db, *dc;            // [units of a group, rows, tokens, groups, state]
    float *da, *dd;            // [rows, heads]
    float *dinitial;           // as `initial`, or null
};

inline int64_t padded(int64_t size) { return (size + LANE - 1) / LANE * LANE; }

class Unit {
  public:
    explicit Unit(const Call &call)
        : call_(call), n_(padded(call.state)), p_(padded(call.channels)), size_(n_ * p_),
          chunks_((call.tokens + Q - 1) / Q), segments_((chunks_ + SEGMENT - 1) / SEGMENT) {
        for (auto *matrix : {&b_, &c_, &bt_, &ct_, &dbt_, &dct_, &z_}) matrix->assign(Q * n_, 0.0f);
        for (auto *matrix : {&x_, &xs_, &xt_, &dy_, &dys_, &dyt_, &y_})
            matrix->assign(Q * p_, 0.0f);
        for (auto *matrix : {&scores_, &within_, &weights_, &dweights_, &dscores_})
            matrix->assign(Q * Q, 0.0f);
        ones_.assign(std::max(n_, Q), 1.0f);
    }

    void forward(int64_t unit) {
        place(unit);
        std::vector<float> states(heads_ * size_, 0.0f);
        bool empty = !call_.initial;
        if (!empty) for_heads([&](int64_t i) { read_state(call_.initial, i, &states[i * size_]); });
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
            start(chunk);
            const bool goes_on = chunk + 1 < chunks_ || call_.final;
            for_heads([&](int64_t i) {
                float *state = &states[i * size_];
                if (call_.kept && chunk % SEGMENT == 0)
                    std::memcpy(kept(i, chunk / SEGMENT), state, size_ * sizeof(float));
                forward_head(i, state, empty, goes_on);
            });
            empty = false;
        }
        if (call_.final)
            for_heads([&](int64_t i) { write_state(&states[i * size_], call_.final, i); });
    }

    void backward(int64_t unit) {
        place(unit);
        std::vector<float> states(heads_ * SEGMENT * size_), dstates(heads_ * size_, 0.0f);
        da_.assign(heads_, 0.0);
        dd_.assign(heads_, 0.0);
        bool empty = !call_.dfinal;
        if (!empty) for_heads([&](int64_t i) { read_state(call_.dfinal, i, &dstates[i * size_]); });
        for (int64_t segment = segments_ - 1; segment >= 0; --segment) {
            const int64_t first = segment * SEGMENT;
            const int64_t last = std::min(first + SEGMENT, chunks_);
            again(segment, first, last, states.data());
            for (int64_t chunk = last - 1; chunk >= first; --chunk) {
                start(chunk);
                for (auto *matrix : {&dbt_, &dct_, &dscores_})
                    std::fill(matrix->begin(), matrix->end(), 0.0f);
                const bool starts_empty = chunk == 0 && !call_.initial;
                for_heads([&](int64_t i) {
                    backward_head(i, &states[(i * SEGMENT + chunk - first) * size_],
                                  &dstates[i * size_], starts_empty, empty);
                });
                empty = false;
                write_group_grads();
            }
        }
        for_heads([&](int64_t i) {
            call_.da[row_ * call_.heads + head_ + i] = float(da_[i]);
            call_.dd[row_ * call_.heads + head_ + i] = float(dd_[i]);
            if (call_.dinitial) write_state(&dstates[i * size_], call_.dinitial, i);
        });
    }

  private:
    template <typename Do> void for_heads(Do act) {
        for (int64_t i = 0; i < heads_; ++i) act(i);
    }

    // ---- where the unit lies -------------------------------------------------------------------

    void place(int64_t unit) {
        const int64_t of_group = call_.heads / call_.groups;
        const int64_t parts = (of_group + call_.heads_of_unit - 1) / call_.heads_of_unit;
        part_ = unit % parts;
        group_ = unit / parts % call_.groups;
        row_ = unit / parts / call_.groups;
        const int64_t first = part_ * call_.heads_of_unit;
        head_ = group_ * of_group + first;
        heads_ = std::min(of_group - first, call_.heads_of_unit);
    }

    float *kept(int64_t i, int64_t segment) const {
        return call_.kept + ((row_ * call_.heads + head_ + i) * segments_ + segment) * size_;
    }

    // act(number of a caller's state, number of ours)
    template <typename Do> void for_state(int64_t i, Do act) const {
        const int64_t first = (row_ * call_.heads + head_ + i) * call_.channels;
        for (int64_t p = 0; p < call_.channels; ++p)
            for (int64_t n = 0; n < call_.state; ++n)
                act((first + p) * call_.state + n, n * p_ + p);
    }

    void read_state(const float *from, int64_t i, float *state) const {
        for_state(i, [=](int64_t theirs, int64_t ours) { state[ours] = from[theirs]; });
    }

    void write_state(const float *state, float *to, int64_t i) const {
        for_state(i, [=](int64_t theirs, int64_t ours) { to[theirs] = state[ours]; });
    }

    // Rows of one head or group as fp32; rows behind the last token are zero.
    void read(const void *from, int64_t row, int64_t token, int64_t column, int64_t size,
              int64_t width, float *out) const {
        const int64_t first = row_ * row + token_ * token + column;
        auto copy = [&](auto *numbers) {
            for (int64_t i = 0; i < q_; ++i)
                for (int64_t j = 0; j < size; ++j)
                    out[i * width + j] = load(numbers + first + i * token + j);
        };
        if (call_.half)
            copy(static_cast<const Bf16 *>(from));
        else
            copy(static_cast<const float *>(from));
        if (q_ < rows_) std::memset(out + q_ * width, 0, (rows_ - q_) * width * sizeof(float));
    }

    // x and the decays of one head.
    void read_head(int64_t i) {
        read(call_.x, call_.x_row, call_.x_token, (head_ + i) * call_.channels, call_.channels, p_,
             x_.data());
        const int64_t first = (row_ * call_.tokens + token_) * call_.heads + head_ + i;
        decays_.fill(call_.dt + first, call_.heads, call_.a[head_ + i]);
        through_.assign(n_, decays_.enter[q_ - 1]);
    }

    // ---- a chunk -------------------------------------------------------------------------------

    // What all heads of a group share: B, C and their products.
    void start(int64_t chunk, bool with_scores = true) {
        token_ = chunk * Q;
        q_ = std::min(call_.tokens - token_, Q);
        rows_ = padded(q_);
        const int32_t *documents = call_.documents;
        decays_.place(documents ? documents + row_ * call_.tokens : nullptr, token_, q_);
        read(call_.b, call_.b_row, call_.b_token, group_ * call_.state, call_.state, n_, b_.data());
        if (!with_scores) return;
        read(call_.c, call_.c_row, call_.c_token, group_ * call_.state, call_.state, n_, c_.data());
        transpose(b_.data(), rows_, n_, bt_.data());
        product(Form::result_lower, rows_, rows_, n_, {c_.data(), n_, 1}, bt_.data(), rows_,
                scores_.data(), Q, nullptr);
    }

    // state = through * state + B^T (out * x)
    void advance(float *state, bool empty) {
        scale_rows(x_.data(), decays_.out, rows_, p_, xs_.data());
        product(Form::full, n_, p_, rows_, {b_.data(), 1, n_}, xs_.data(), p_, state, p_,
                empty ? nullptr : through_.data());
    }

    void forward_head(int64_t i, float *state, bool empty, bool goes_on) {
        read_head(i);
        decays_.weigh(scores_.data(), within_.data(), weights_.data());
        scale_rows(x_.data(), decays_.dt, rows_, p_, xs_.data());
        if (!empty)
            product(Form::full, rows_, p_, n_, {c_.data(), n_, 1}, state, p_, y_.data(), p_,
                    nullptr);
        product(Form::left_lower, rows_, p_, rows_, {weights_.data(), Q, 1}, xs_.data(), p_,
                y_.data(), p_, empty ? nullptr : decays_.enter);
        write_tokens(call_.y, i, y_.data(), ones_.data(), x_.data());
        if (goes_on) advance(state, empty);
    }

    // to = scale * from + D * skip
    void write_tokens(void *to, int64_t i, const float *from, const float *scale,
                      const float *skip) {
        const float d = call_.d ? call_.d[head_ + i] : 0.0f;
        const int64_t step = call_.heads * call_.channels;
        const int64_t first = (row_ * call_.tokens + token_) * step + (head_ + i) * call_.channels;
        auto write = [&](auto *numbers) {
            for (int64_t t = 0; t < q_; ++t)
                for (int64_t p = 0; p < call_.channels; ++p)
                    store(numbers + first + t * step + p,
                          scale[t] * from[t * p_ + p] + d * skip[t * p_ + p]);
        };
        if (call_.half)
            write(static_cast<Bf16 *>(to));
        else
            write(static_cast<float *>(to));
    }

    // The states before the chunks first .. last - 1 of a segment once more.
    void again(int64_t segment, int64_t first, int64_t last, float *states) {
        for_heads([&](int64_t i) {
            std::memcpy(states + i * SEGMENT * size_, kept(i, segment), size_ * sizeof(float));
        });
        for (int64_t chunk = first; chunk + 1 < last; ++chunk) {
            start(chunk, false);
            for_heads([&](int64_t i) {
                read_head(i);
                float *state = states + (i * SEGMENT + chunk - first) * size_;
                std::memcpy(state + size_, state, size_ * sizeof(float));
                advance(state + size_, false);
            });
        }
    }

    void backward_head(int64_t i, const float *state, float *dstate, bool starts_empty,
                       bool ends_empty) {
        read_head(i);
        read(call_.dy, call_.dy_row, call_.dy_token, (head_ + i) * call_.channels, call_.channels,
             p_, dy_.data());
        decays_.weigh(scores_.data(), within_.data(), weights_.data());
        transpose(x_.data(), rows_, p_, xt_.data());
        transpose(dy_.data(), rows_, p_, dyt_.data());
        float steps[Q] = {}, entered[Q] = {}, left[Q] = {};
        product(Form::result_lower, rows_, rows_, p_, {dy_.data(), p_, 1}, xt_.data(), rows_,
                dweights_.data(), Q, nullptr);
        within_grads(steps);
        double through = 0.0;
        if (!ends_empty) {
            product(Form::full, rows_, p_, n_, {b_.data(), n_, 1}, dstate, p_, y_.data(), p_,
                    nullptr);
            for (int64_t t = 0; t < q_; ++t)
                left[t] = decays_.out[t] * dot(&x_[t * p_], &y_[t * p_], p_);
            scale_columns(xt_.data(), decays_.out, p_, rows_, xt_.data());
            product(Form::full, n_, rows_, p_, {dstate, p_, 1}, xt_.data(), rows_, dbt_.data(),
                    rows_, ones_.data());
            if (!starts_empty) through = through_[0] * double(dot(state, dstate, size_));
        }
        product(Form::left_upper, rows_, p_, rows_, {weights_.data(), 1, Q}, dy_.data(), p_,
                y_.data(), p_, ends_empty ? nullptr : decays_.leave);
        if (!starts_empty) {
            enter_grads(state, entered);
            scale_rows(dy_.data(), decays_.enter, rows_, p_, dys_.data());
            product(Form::full, n_, p_, rows_, {c_.data(), 1, n_}, dys_.data(), p_, dstate, p_,
                    ends_empty ? nullptr : through_.data());
        }
        token_grads(i, steps, entered, left, through);
        write_tokens(call_.dx, i, y_.data(), decays_.dt, dy_.data());
    }

    // Gradients of scores, and of a token's step by all pairs that it lies between.
    void within_grads(float *steps) {
        float columns[Q] = {};
        for (int64_t i = rows_ - 1; i >= 0; --i) {
            const float *within = &within_[i * Q], *weights = &weights_[i * Q];
            float *dweights = &dweights_[i * Q], *dscores = &dscores_[i * Q];
            const int64_t width = padded(i + 1);
            for (int64_t j = 0; j < width; ++j) {
                const float grad = dweights[j] * decays_.dt[j];
                dscores[j] += grad * within[j];
                columns[j] += grad * weights[j];
            }
            // From here on no pair begins at i or later.
            for (int64_t j = i; j < width; ++j) columns[j] = 0.0f;
            steps[i] = dot(columns, ones_.data(), width);
        }
    }

    // Gradients through C_i state: of C, and of the decays from the chunk's start.
    void enter_grads(const float *state, float *entered) {
        scale_columns(dyt_.data(), decays_.enter, p_, rows_, dyt_.data());
        product(Form::full, n_, rows_, p_, {state, p_, 1}, dyt_.data(), rows_, z_.data(), rows_,
                nullptr);
        transpose(c_.data(), rows_, n_, ct_.data());
        for (int64_t n = 0; n < n_; ++n)
            for (int64_t t = 0; t < rows_; ++t) {
                dct_[n * rows_ + t] += z_[n * rows_ + t];
                entered[t] += ct_[n * rows_ + t] * z_[n * rows_ + t];
            }
    }

    void token_grads(int64_t i, const float *steps, const float *entered, const float *left,
                     double through) {
        float *ddt = call_.ddt + (row_ * call_.tokens + token_) * call_.heads + head_ + i;
        double behind = 0.0, before = through, step[Q];
        for (int64_t t = 0; t < q_; ++t) {
            step[t] = before + steps[t];
            before += left[t];
        }
        for (int64_t t = q_ - 1; t >= 0; --t) {
            behind += entered[t];
            step[t] += behind;
            da_[i] += step[t] * decays_.dt[t];
            dd_[i] += dot(&dy_[t * p_], &x_[t * p_], p_);
            ddt[t * call_.heads] =
                float(double(dot(&x_[t * p_], &y_[t * p_], p_)) + step[t] * call_.a[head_ + i]);
        }
    }

    void write_group_grads() {
        const int64_t place = ((part_ * call_.rows + row_) * call_.tokens + token_) * call_.groups;
        write_group(Left{dscores_.data(), 1, Q}, Form::left_upper, c_, dbt_, call_.db, place);
        write_group(Left{dscores_.data(), Q, 1}, Form::left_lower, b_, dct_, call_.dc, place);
    }

    void write_group(Left left, Form form, const std::vector<float> &right,
                     const std::vector<float> &turned, float *to, int64_t place) {
        transpose(turned.data(), n_, rows_, z_.data());
        product(form, rows_, n_, rows_, left, right.data(), n_, z_.data(), n_, ones_.data());
        for (int64_t t = 0; t < q_; ++t)
            std::memcpy(to + (place + t * call_.groups + group_) * call_.state, &z_[t * n_],
                        call_.state * sizeof(float));
    }

    const Call &call_;
    const int64_t n_, p_, size_, chunks_, segments_;
    int64_t part_ = 0, group_ = 0, row_ = 0, head_ = 0, heads_ = 0;  // the unit
    int64_t token_ = 0, q_ = 0, rows_ = 0;                           // the chunk
    std::vector<float> b_, c_, bt_, ct_, dbt_, dct_, z_;             // [Q, n] or [n, Q]
    std::vector<float> x_, xs_, xt_, dy_, dys_, dyt_, y_;            // [Q, p] or [p, Q]
    std::vector<float> scores_, within_, weights_, dweights_, dscores_, through_, ones_;
    std::vector<double> da_, dd_;
    Decays decays_;
};

template <typename Do> void run(const Call &call, Do act) {
    const int64_t of_group = call.heads / call.groups;
    const int64_t parts = (of_group + call.heads_of_unit - 1) / call.heads_of_unit;
    const int64_t units = call.rows * call.groups * parts;
#pragma omp parallel num_threads(int(call.threads))
    {
        Unit work(call);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < units; ++unit) act(work, unit);
    }
}

}  // namespace

extern "C" void lengen_ssd_forward(const Call *call) {
    run(*call, [](Unit &work, int64_t unit) { work.forward(unit); });
}

extern "C" void lengen_ssd_backward(const Call *call) {
    run(*call, [](Unit &work, int64_t unit) { work.backward(unit); });
}
