// How much of a token is left at a later one, within a chunk of one head; for native_ssd.cpp.

#pragma once

#include "native_common.h"
#include "native_matrix.h"

constexpr int64_t Q = 64;  // tokens of a chunk

struct Decays {
    float dt[Q], enter[Q], leave[Q];  // step; decay from the chunk's start and to its end
    float out[Q];                     // leave * dt

    // Where the chunk of q tokens lies; documents: the row's growing numbers, or null.
    void place(const int32_t *documents, int64_t token, int64_t q) {
        q_ = q;
        int32_t before = documents ? documents[token ? token - 1 : 0] : 0, first = -1;
        for (int32_t i = 0; i < q; ++i) {
            if (documents && documents[token + i] != before) {
                first = i;
                before = documents[token + i];
            }
            first_[i] = first;
        }
    }

    // The decays by steps that lie `stride` apart.
    void fill(const float *steps, int64_t stride, double a) {
        double sum = 0.0, sums[Q];
        for (int64_t t = 0; t < q_; ++t) {
            dt[t] = steps[t * stride];
            sum = first_[t] == t ? 0.0 : sum + a * double(dt[t]);
            sums[t] = sum;
        }
        for (int64_t t = 0; t < Q; ++t) {
            const bool there = t < q_;
            if (!there) dt[t] = 0.0f;
            high_[t] = there ? float(sums[t]) : 0.0f;
            low_[t] = there ? float(sums[t] - double(high_[t])) : 0.0f;
            enter[t] = there && first_[t] == -1 ? high_[t] : NOTHING;
            leave[t] = there && first_[t] == first_[q_ - 1] ? float(sum - sums[t]) : NOTHING;
        }
        for (int64_t t = 0; t < Q; ++t) {
            enter[t] = exp_of(enter[t]);
            leave[t] = exp_of(leave[t]);
            out[t] = leave[t] * dt[t];
        }
    }

    // Decays between tokens, [Q, Q] with zeros above the diagonal, and the scores that they weigh.
    void weigh(const float *scores, float *within, float *weights) const {
        for (int32_t i = 0; i < Q && i < (q_ + LANE - 1) / LANE * LANE; ++i) {
            const float high = high_[i], low = low_[i];
            const int32_t last = i < q_ ? i : -1, first = i < q_ ? first_[i] : 0;
            const int32_t width = (i / LANE + 1) * LANE;
            for (int32_t j = 0; j < width; ++j) {
                const float step = (high - high_[j]) + (low - low_[j]);
                const float decay = exp_of(step < 0.0f ? step : 0.0f);
                within[j] = (j >= first) & (j <= last) ? decay : 0.0f;
                weights[j] = within[j] * scores[j];
            }
            scores += Q;
            within += Q;
            weights += Q;
        }
    }

  private:
    static constexpr float NOTHING = -1000.0f;  // exp of it is 0
    int64_t q_ = 0;
    int32_t first_[Q];          // the chunk's first token of a document, -1: it started before
    float high_[Q], low_[Q];    // sums of steps times a, as two numbers
};
