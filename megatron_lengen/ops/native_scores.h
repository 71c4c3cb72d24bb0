// Queries, keys and the scores between them, a tile in cache at a time; for native_attention.cpp.
//
// Scores lie with queries in the lanes, [keys, queries]: maxima and sums then need no exchange
// between lanes, and keys and values are read as they are. They are in units of log 2. Sizes are
// padded with zeros in scratch memory, so no product has edges.
//
// `Call` mirrors the ctypes structure in attention_native.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "native_common.h"
#include "native_matrix.h"

namespace attention {

constexpr int64_t BLOCK = 32;  // queries of one head
constexpr int64_t KEYS = 64;   // of a tile
constexpr int64_t STEP = 8;    // keys are taken or left out so many at a time
static_assert(STEP % TILE_ROWS == 0 && BLOCK % TILE_COLUMNS == 0 && KEYS % STEP == 0, "tiles");

struct Tensor {  // [rows, heads, tokens, channels], fp32 or bf16; channels lie side by side
    void *at;
    int64_t row, head, token;  // strides
};

struct Range {
    int64_t first, last;  // without the last
};

struct Part {  // of a row, in backward
    Range spans;
    Range tiles;    // that it may touch
    int64_t place;  // number of the first among the tiles of all parts
};

struct Call {
    int64_t rows, heads, groups, queries, keys, channels, values;  // values: channels of v
    int64_t window, span, parts, threads, half;                    // half: whether bf16
    double scale;
    const float *slopes;       // [heads], or null
    const int64_t *documents;  // [rows, keys], never falling, or null
    Tensor q, k, v, out, dout, dq, dk, dv;
    float *sums;   // [rows, heads, queries], log 2 of each query's sum
    const Part *part;  // [parts]
    float *partial;    // [rows, groups, tiles of all parts, 64 keys, padded channels and values]
};

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Zeros, aligned with vectors.
class Numbers {
  public:
    void resize(int64_t size) {
        const size_t bytes = std::max<int64_t>(size, 1) * sizeof(float);
        at_.reset(static_cast<float *>(::operator new(bytes, std::align_val_t(64))));
        std::memset(at_.get(), 0, bytes);
    }
    float *at(int64_t i) const { return at_.get() + i; }

  private:
    struct Free {
        void operator()(float *p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<float, Free> at_;
};

// ---- vectors -----------------------------------------------------------------------------------

using Whole = int32_t __attribute__((vector_size(WIDTH * sizeof(int32_t))));

inline void put(float *p, Lanes value) { std::memcpy(p, &value, sizeof value); }

inline Whole whole_at(const int32_t *p) {
    Whole value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// 2^x for x <= 128 or so within 2 units in the last place; 0 below -126, and exactly 1 at 0.
inline Lanes exp2_of(Lanes x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Lanes shifted = x + magic;
    const Lanes r = x - (shifted - magic);
    Lanes sum = 1.53534146e-4f * r + 1.33989239e-3f;
    sum = sum * r + 9.61843785e-3f;
    sum = sum * r + 5.55033237e-2f;
    sum = sum * r + 2.40226477e-1f;
    sum = sum * r + 6.93147182e-1f;
    sum = sum * r + 1.0f;
    // The lowest bits of `shifted` are the whole number; it is added to the exponent.
    Whole power, bits;
    std::memcpy(&power, &shifted, sizeof power);
    std::memcpy(&bits, &sum, sizeof bits);
    bits += power << 23;
    std::memcpy(&sum, &bits, sizeof sum);
    return x < -126.0f ? Lanes{} : sum;
}

// ---- queries -----------------------------------------------------------------------------------

// Up to 32 queries of one head. Lanes behind the last repeat its position; their rows are zero.
struct Block {
    int64_t head, query, count;
    bool begun;                              // whether a tile was added to its result
    float slope;                             // in units of log 2
    int32_t position[BLOCK], first[BLOCK];   // it sees keys first .. position
    float largest[BLOCK], sum[BLOCK], mean[BLOCK];
};

class Work {
  public:
    explicit Work(const Call &call)
        : call_(call), share_(call.heads / call.groups), d_(round_up(call.channels, LANE)),
          e_(round_up(call.values, LANE)), blocks_(share_ * round_up(call.span, BLOCK) / BLOCK) {
        k_.resize(KEYS * d_);
        v_.resize(KEYS * e_);
        scores_.resize(KEYS * BLOCK);
        rows_.resize(BLOCK * std::max(d_, e_));
        turned_.resize(blocks_.size() * BLOCK * d_);
        result_.resize(blocks_.size() * BLOCK * std::max(d_, e_));
        std::fill(ones_, ones_ + KEYS, 1.0f);
    }

  protected:
    // The blocks of one span of positions, for all heads of a group.
    void place(int64_t row, int64_t group, int64_t span) {
        row_ = row;
        group_ = group;
        const int64_t start = span * call_.span, stop = std::min(start + call_.span, call_.queries);
        used_ = 0;
        for (int64_t head = group * share_; head < (group + 1) * share_; ++head)
            for (int64_t query = start; query < stop; query += BLOCK)
                place_block(blocks_[used_++], head, query, std::min(stop - query, BLOCK));
        first_tile_ = blocks_[0].first[0] / KEYS;
        last_tile_ = blocks_[used_ - 1].position[BLOCK - 1] / KEYS + 1;
    }

    void place_block(Block &block, int64_t head, int64_t query, int64_t count) const {
        block.head = head;
        block.query = query;
        block.count = count;
        block.begun = false;
        block.slope = call_.slopes ? call_.slopes[head] * float(M_LOG2E) : 0.0f;
        const int64_t *documents = call_.documents ? call_.documents + row_ * call_.keys : nullptr;
        const int64_t own = call_.keys - call_.queries + query;
        int64_t start = 0;
        if (documents)
            start = std::lower_bound(documents, documents + own, documents[own]) - documents;
        for (int64_t lane = 0; lane < BLOCK; ++lane) {
            const int64_t position = own + std::min(lane, count - 1);
            if (documents && lane > 0 && documents[position] != documents[position - 1])
                start = position;
            block.position[lane] = int32_t(position);
            block.first[lane] = int32_t(std::max(start, position - call_.window + 1));
            block.largest[lane] = -1e30f;
            block.sum[lane] = 0.0f;
        }
    }

    // Which keys of a tile any query of the block sees, to whole steps.
    bool reach(const Block &block, int64_t tile, int64_t &first, int64_t &last) const {
        first = std::max<int64_t>(block.first[0] / STEP * STEP, tile * KEYS);
        last = std::min(round_up(block.position[BLOCK - 1] + 1, STEP), (tile + 1) * KEYS);
        return first < last;
    }

    // ---- reading and writing -------------------------------------------------------------------

    // `count` rows of one head as fp32, padded with zeros to [rows, width].
    void read(const Tensor &from, int64_t head, int64_t token, int64_t count, int64_t size,
              int64_t rows, int64_t width, float *out) const {
        const int64_t start = row_ * from.row + head * from.head + token * from.token;
        auto copy = [&](auto *numbers) {
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < size; ++j)
                    out[i * width + j] = load(numbers + start + i * from.token + j);
        };
        if (call_.half)
            copy(static_cast<const Bf16 *>(from.at));
        else
            copy(static_cast<const float *>(from.at));
        if (count < rows)
            std::memset(out + count * width, 0, (rows - count) * width * sizeof(float));
    }

    // to = scale[i] * from[i]
    void write(const Tensor &to, int64_t head, int64_t token, int64_t count, int64_t size,
               const float *from, int64_t width, const float *scale) const {
        const int64_t start = row_ * to.row + head * to.head + token * to.token;
        auto copy = [&](auto *numbers) {
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < size; ++j)
                    store(numbers + start + i * to.token + j, scale[i] * from[i * width + j]);
        };
        if (call_.half)
            copy(static_cast<Bf16 *>(to.at));
        else
            copy(static_cast<float *>(to.at));
    }

    void read_tile(int64_t tile) {
        token_ = tile * KEYS;
        const int64_t count = std::min(call_.keys - token_, KEYS);
        read(call_.k, group_, token_, count, call_.channels, KEYS, d_, k_.at(0));
        read(call_.v, group_, token_, count, call_.values, KEYS, e_, v_.at(0));
    }

    // Queries, scaled for scores in units of log 2, [channels, queries].
    void turn_queries(const float *rows, float *turned) const {
        transpose(rows, BLOCK, d_, turned);
        const float scale = float(call_.scale * M_LOG2E);
        for (int64_t i = 0; i < d_ * BLOCK; ++i) turned[i] *= scale;
    }

    // ---- scores --------------------------------------------------------------------------------

    void score(const Block &block, const float *turned, int64_t first, int64_t last) {
        product(Form::full, last - first, BLOCK, d_, {k_.at((first - token_) * d_), d_, 1}, turned,
                BLOCK, scores_.at(0), BLOCK, nullptr);
        const bool whole = block.first[BLOCK - 1] <= first && last - 1 <= block.position[0];
        if (block.slope != 0.0f) bias(block, first, last);
        if (!whole) hide(block, first, last);
    }

    void bias(const Block &block, int64_t first, int64_t last) {
        for (int64_t lane = 0; lane < BLOCK; lane += WIDTH) {
            const Lanes position = __builtin_convertvector(whole_at(block.position + lane), Lanes);
            for (int64_t j = first; j < last; ++j) {
                float *scores = scores_.at((j - first) * BLOCK + lane);
                put(scores, lanes_at(scores) + block.slope * (float(j) - position));
            }
        }
    }

    void hide(const Block &block, int64_t first, int64_t last) {
        const Lanes nothing = Lanes{} - std::numeric_limits<float>::infinity();
        for (int64_t lane = 0; lane < BLOCK; lane += WIDTH) {
            const Whole begin = whole_at(block.first + lane), end = whole_at(block.position + lane);
            for (int64_t j = first; j < last; ++j) {
                float *scores = scores_.at((j - first) * BLOCK + lane);
                const Whole key = Whole{} + int32_t(j);
                const Whole seen = (begin <= key) & (key <= end);
                put(scores, seen ? lanes_at(scores) : nothing);
            }
        }
    }

    const Call &call_;
    const int64_t share_, d_, e_;
    int64_t row_ = 0, group_ = 0, used_ = 0, first_tile_ = 0, last_tile_ = 0, token_ = 0;
    std::vector<Block> blocks_;
    Numbers k_, v_, scores_, rows_, turned_, result_;  // turned, result: of all blocks
    float ones_[KEYS];
};

}  // namespace attention
