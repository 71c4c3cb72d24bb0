// Softmax attention on the CPU: what tiles.py computes for alpha 1, a block of 32 queries against
// 64 keys in cache at a time (Dao et al. 2022). Sums are fp32; memory is linear in the length.
//
// A unit of work is a span of positions, for all heads that share their keys, and in backward a
// part of a row's spans: how the work is shared out depends on the sizes alone, so the result does
// not depend on the threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "native_scores.h"

namespace {

using namespace attention;

// ---- forward -----------------------------------------------------------------------------------

class Forward : Work {
  public:
    explicit Forward(const Call &call) : Work(call) {}

    static int64_t units(const Call &call) {
        return call.rows * call.groups * ((call.queries + call.span - 1) / call.span);
    }

    void run(int64_t unit) {
        // The last spans see the most keys and come first.
        const int64_t of_all = call_.rows * call_.groups;
        place(unit % of_all / call_.groups, unit % call_.groups,
              units(call_) / of_all - 1 - unit / of_all);
        for (int64_t i = 0; i < used_; ++i) {
            const Block &block = blocks_[i];
            read(call_.q, block.head, block.query, block.count, call_.channels, BLOCK, d_,
                 rows_.at(0));
            turn_queries(rows_.at(0), turned_.at(i * BLOCK * d_));
        }
        for (int64_t tile = first_tile_; tile < last_tile_; ++tile) {
            read_tile(tile);
            for (int64_t i = 0; i < used_; ++i) attend(i, tile);
        }
        for (int64_t i = 0; i < used_; ++i) finish(blocks_[i], result_.at(i * BLOCK * e_));
    }

  private:
    void attend(int64_t i, int64_t tile) {
        Block &block = blocks_[i];
        int64_t first, last;
        if (!reach(block, tile, first, last)) return;
        score(block, turned_.at(i * BLOCK * d_), first, last);
        float keep[BLOCK];
        for (int64_t lane = 0; lane < BLOCK; lane += WIDTH)
            weigh(block, lane, last - first, keep + lane);
        product(Form::full, BLOCK, e_, last - first, {scores_.at(0), 1, BLOCK},
                v_.at((first - token_) * e_), e_, result_.at(i * BLOCK * e_), e_,
                block.begun ? keep : nullptr);
        block.begun = true;
    }

    // Scores become weights of the largest score so far; `keep` is what earlier ones are worth.
    void weigh(Block &block, int64_t lane, int64_t keys, float *keep) {
        float *scores = scores_.at(lane);
        const Lanes before = lanes_at(block.largest + lane);
        Lanes most[4] = {before, before, before, before}, sum[4] = {};
        for (int64_t j = 0; j < keys; j += 4)
            for (int u = 0; u < 4; ++u)
                most[u] = larger(most[u], lanes_at(scores + (j + u) * BLOCK));
        const Lanes largest = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        for (int64_t j = 0; j < keys; j += 4)
            for (int u = 0; u < 4; ++u) {
                const Lanes weight = exp2_of(lanes_at(scores + (j + u) * BLOCK) - largest);
                put(scores + (j + u) * BLOCK, weight);
                sum[u] += weight;
            }
        const Lanes kept = exp2_of(before - largest);
        put(keep, kept);
        put(block.largest + lane, largest);
        put(block.sum + lane,
            lanes_at(block.sum + lane) * kept + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    }

    void finish(const Block &block, const float *result) {
        float scale[BLOCK];
        float *sums = call_.sums + (row_ * call_.heads + block.head) * call_.queries + block.query;
        for (int64_t lane = 0; lane < block.count; ++lane) {
            scale[lane] = 1.0f / block.sum[lane];
            sums[lane] = block.largest[lane] + std::log2(block.sum[lane]);
        }
        write(call_.out, block.head, block.query, block.count, call_.values, result, e_, scale);
    }
};

// ---- backward ----------------------------------------------------------------------------------

class Backward : Work {
  public:
    explicit Backward(const Call &call) : Work(call) {
        grads_.resize(KEYS * BLOCK);
        q_.resize(blocks_.size() * BLOCK * d_);
        dout_.resize(blocks_.size() * BLOCK * e_);
        dout_turned_.resize(blocks_.size() * BLOCK * e_);
    }

    static int64_t units(const Call &call) { return call.rows * call.groups * call.parts; }

    // Gradients of queries, and this part's sums of those of keys and values.
    void run(int64_t unit, Range &touched) {
        const int64_t of_all = call_.rows * call_.groups;
        const Part &part = call_.part[call_.parts - 1 - unit / of_all];
        touched = {part.tiles.first, part.tiles.first};
        for (int64_t span = part.spans.first; span < part.spans.last; ++span) {
            place(unit % of_all / call_.groups, unit % call_.groups, span);
            begin_tiles(part, touched);
            for (int64_t i = 0; i < used_; ++i) prepare(i);
            for (int64_t tile = first_tile_; tile < last_tile_; ++tile) {
                read_tile(tile);
                partial_ = sums_of(part, tile);
                for (int64_t i = 0; i < used_; ++i) attend(i, tile);
            }
            float scale[BLOCK];
            std::fill(scale, scale + BLOCK, float(call_.scale));
            for (int64_t i = 0; i < used_; ++i) {
                const Block &block = blocks_[i];
                write(call_.dq, block.head, block.query, block.count, call_.channels,
                      result_.at(i * BLOCK * d_), d_, scale);
            }
        }
    }

    static int64_t tiles(const Call &call) {
        return call.rows * call.groups * ((call.keys + KEYS - 1) / KEYS);
    }

    // The sum of all parts for one tile of keys; `touched` are the tiles of all units.
    void add_parts(int64_t unit, const Range *touched) {
        const int64_t of_all = call_.rows * call_.groups, tile = unit / of_all;
        const int64_t count = std::min(call_.keys - tile * KEYS, KEYS);
        row_ = unit % of_all / call_.groups;
        group_ = unit % call_.groups;
        std::memset(k_.at(0), 0, KEYS * d_ * sizeof(float));
        std::memset(v_.at(0), 0, KEYS * e_ * sizeof(float));
        for (int64_t other = 0; other < call_.parts; ++other) {
            const Range &seen = touched[other * of_all + unit % of_all];
            if (tile < seen.first || tile >= seen.last) continue;
            const float *sums = sums_of(call_.part[call_.parts - 1 - other], tile);
            for (int64_t i = 0; i < KEYS * d_; ++i) k_.at(0)[i] += sums[i];
            for (int64_t i = 0; i < KEYS * e_; ++i) v_.at(0)[i] += sums[KEYS * d_ + i];
        }
        float scale[KEYS];
        std::fill(scale, scale + KEYS, float(call_.scale));
        write(call_.dk, group_, tile * KEYS, count, call_.channels, k_.at(0), d_, scale);
        write(call_.dv, group_, tile * KEYS, count, call_.values, v_.at(0), e_, ones_);
    }

  private:
    // Where a part adds up the gradients of one tile's keys, and behind them those of its values.
    float *sums_of(const Part &part, int64_t tile) const {
        const Part &last = call_.part[call_.parts - 1];
        const int64_t tiles = last.place + last.tiles.last - last.tiles.first;
        const int64_t place = (row_ * call_.groups + group_) * tiles + part.place;
        return call_.partial + (place + tile - part.tiles.first) * KEYS * (d_ + e_);
    }

    // Tiles that the span is the first to touch start with zeros.
    void begin_tiles(const Part &part, Range &touched) {
        if (touched.first == touched.last) touched = {first_tile_, first_tile_};
        for (; touched.last < last_tile_; ++touched.last)
            std::memset(sums_of(part, touched.last), 0, KEYS * (d_ + e_) * sizeof(float));
    }

    void prepare(int64_t i) {
        Block &block = blocks_[i];
        float *q = q_.at(i * BLOCK * d_), *dout = dout_.at(i * BLOCK * e_);
        read(call_.q, block.head, block.query, block.count, call_.channels, BLOCK, d_, q);
        turn_queries(q, turned_.at(i * BLOCK * d_));
        read(call_.dout, block.head, block.query, block.count, call_.values, BLOCK, e_, dout);
        transpose(dout, BLOCK, e_, dout_turned_.at(i * BLOCK * e_));
        read(call_.out, block.head, block.query, block.count, call_.values, BLOCK, e_, rows_.at(0));
        const float *sums =
            call_.sums + (row_ * call_.heads + block.head) * call_.queries + block.query;
        for (int64_t lane = 0; lane < BLOCK; ++lane) {
            block.sum[lane] = sums[std::min(lane, block.count - 1)];
            block.mean[lane] = dot(dout + lane * e_, rows_.at(lane * e_), e_);
        }
    }

    void attend(int64_t i, int64_t tile) {
        Block &block = blocks_[i];
        int64_t first, last;
        if (!reach(block, tile, first, last)) return;
        const int64_t keys = last - first, place = first - token_;
        score(block, turned_.at(i * BLOCK * d_), first, last);
        product(Form::full, keys, BLOCK, e_, {v_.at(place * e_), e_, 1},
                dout_turned_.at(i * BLOCK * e_), BLOCK, grads_.at(0), BLOCK, nullptr);
        for (int64_t lane = 0; lane < BLOCK; lane += WIDTH) weigh(block, lane, keys);
        product(Form::full, keys, e_, BLOCK, {scores_.at(0), BLOCK, 1}, dout_.at(i * BLOCK * e_),
                e_, partial_ + KEYS * d_ + place * e_, e_, ones_);
        product(Form::full, keys, d_, BLOCK, {grads_.at(0), BLOCK, 1}, q_.at(i * BLOCK * d_), d_,
                partial_ + place * d_, d_, ones_);
        product(Form::full, BLOCK, d_, keys, {grads_.at(0), 1, BLOCK}, k_.at(place * d_), d_,
                result_.at(i * BLOCK * d_), d_, block.begun ? ones_ : nullptr);
        block.begun = true;
    }

    // Scores become weights, gradients of weights those of scores.
    void weigh(const Block &block, int64_t lane, int64_t keys) {
        const Lanes sum = lanes_at(block.sum + lane), mean = lanes_at(block.mean + lane);
        for (int64_t j = 0; j < keys; ++j) {
            float *score = scores_.at(j * BLOCK + lane), *grad = grads_.at(j * BLOCK + lane);
            const Lanes weight = exp2_of(lanes_at(score) - sum);
            put(score, weight);
            put(grad, weight * (lanes_at(grad) - mean));
        }
    }

    Numbers grads_, q_, dout_, dout_turned_;
    float *partial_ = nullptr;  // sums of the tile
};

}  // namespace

extern "C" void lengen_attention_forward(const Call *call) {
    const int64_t units = Forward::units(*call);
#pragma omp parallel num_threads(int(call->threads))
    {
        Forward work(*call);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < units; ++unit) work.run(unit);
    }
}

extern "C" void lengen_attention_backward(const Call *call) {
    const int64_t units = Backward::units(*call), tiles = Backward::tiles(*call);
    std::vector<Range> touched(units);
#pragma omp parallel num_threads(int(call->threads))
    {
        Backward work(*call);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < units; ++unit) work.run(unit, touched[unit]);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < tiles; ++unit) work.add_parts(unit, touched.data());
    }
}
