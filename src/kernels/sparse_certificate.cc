// What choices left out: its bound, from the boxes; dense attention where that is too much; and audits, which
// tell what it was in fact.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/round.h"
#include "kernels/kernel_table.h"
#include "kernels/sparse_rows.h"

namespace moesaic::kernels {
namespace {

// Query heads and blocks whose bounds a worker has at once: they fit into a second-level cache.
constexpr int kTaskHeads = 128, kBoundBlocks = 128;
constexpr int kRowStep = 8;  // micro-kernels read whole groups of rows

// Partial sums and maxima that compilers make one register of; a single one would wait for itself at each
// step.
constexpr int kLanes = 16;

// Scales `count` floats, a multiple of 8, and returns the sum of their squares.
float ScaleAndSquare(const float* from, float scale, int count, float* to) {
  float sums[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      to[i + j] = from[i + j] * scale;
      sums[j] += to[i + j] * to[i + j];
    }
  }
  for (; i < count; ++i) {
    to[i] = from[i] * scale;
    sums[i % kLanes] += to[i] * to[i];
  }
  return std::accumulate(sums, sums + kLanes, 0.0F);
}

class Certificate : public RestOfRows {
 public:
  Certificate(const SparseRows& s, const float* lse)
      : s_(s),
        lse_(lse),
        bounds_(s.Take<float>(std::ssize(s.rows) * s.p.heads)),
        queries_(s.Take<float>(int64_t{kTaskHeads} * (s.p.cache.key_dim + 2) * s.ctx.pool->size())),
        masses_(s.Take<float>(int64_t{kBoundBlocks} * s.ctx.pool->size())),
        params_(s.p) {}

  std::span<const SequenceSlice> Next() override {
    for (;;) {
      switch (next_) {
        case Stage::kFallBack:
          next_ = Stage::kAudit;
          Bound();
          ListFallBacks();
          break;
        case Stage::kAudit:
          next_ = Stage::kDone;
          ListAudits();
          break;
        case Stage::kDone:
          return {};
      }
      if (!params_.sequences.empty()) return params_.sequences;
    }
  }

  void Attend() override {
    Attention(s_.ctx, params_);
    if (next_ == Stage::kDone) CompareAudits();
  }

 private:
  enum class Stage { kFallBack, kAudit, kDone };

  // Whether a bound is wanted. An audit has one of what was chosen by the row itself.
  bool Bounds(int64_t r, int kv_head) const {
    const SparseRow& row = s_.rows[r];
    return row.sparsity().eps < 1 || (s_.Chooses(r) && row.audited == kv_head);
  }

  float* Queries(int worker) const {
    return queries_ + worker * int64_t{kTaskHeads} * (s_.p.cache.key_dim + 2);
  }

  // Scaled queries of `count` heads, whole groups of kRowStep, and behind kTaskHeads of them the lengths of
  // their parts, which it returns.
  const float* LoadQueries(const SparseRow& row, int head, int count, float* queries) const {
    const int dim = s_.p.cache.key_dim, split = KeySplit(s_.p.cache);
    float* const norms = queries + int64_t{kTaskHeads} * dim;
    const float* from = s_.p.q + row.batch_row * s_.p.q_stride + int64_t{head} * dim;
    for (int i = 0; i < count; ++i, queries += dim, from += dim) {
      norms[2 * i] = std::sqrt(ScaleAndSquare(from, s_.p.scale, split, queries)) * kNormSlack;
      norms[2 * i + 1] =
          std::sqrt(ScaleAndSquare(from + split, s_.p.scale, dim - split, queries + split)) * kNormSlack;
    }
    const int idle = base::RoundUp(count, kRowStep) - count;
    std::fill_n(queries, int64_t{idle} * dim, 0.0F);
    std::fill_n(norms + 2 * count, 2 * idle, 0.0F);
    return norms;
  }

  // Of each query head whose bound is wanted, the share of the mass that was left out, at most.
  void Bound() {
    const int64_t room = int64_t{2} * std::min(s_.group, kTaskHeads) * kBoundBlocks;
    auto* const boxes = s_.Take<float>(room * s_.ctx.pool->size());
    s_.ctx.pool->Run(static_cast<int64_t>(s_.rows.size()) * s_.p.cache.heads, [&](int64_t pair, int worker) {
      const int64_t r = pair / s_.p.cache.heads;
      const auto kv_head = static_cast<int>(pair % s_.p.cache.heads);
      if (!Bounds(r, kv_head)) return;
      for (int first = 0; first < s_.group; first += kTaskHeads) {
        BoundHeads(r, kv_head, first, boxes + room * worker, worker);
      }
    });
  }

  // Of up to kTaskHeads of the KV head's query heads. `centers` has room for two numbers of each and a block.
  void BoundHeads(int64_t r, int kv_head, int first, float* centers, int worker) const {
    const SparseRow& row = s_.rows[r];
    const int heads = std::min(s_.group - first, kTaskHeads), head = kv_head * s_.group + first;
    float* const queries = Queries(worker);
    const float* norms = LoadQueries(row, head, heads, queries);
    float* const spreads = centers + int64_t{heads} * kBoundBlocks;
    float* const masses = masses_ + int64_t{kBoundBlocks} * worker;
    const int32_t* chosen =
        s_.chosen + s_.Pair(row.choice, kv_head) * s_.budget;  // the last is the current block
    float left_out[kTaskHeads] = {};
    for (int begin = 0; begin < row.blocks(); begin += kBoundBlocks) {
      const std::byte* digests[kBoundBlocks];
      const int blocks = std::min(row.blocks() - begin, kBoundBlocks);
      s_.FindDigests(row, kv_head, begin, blocks, digests);
      ScoreBoxes(queries, norms, heads, {digests, static_cast<size_t>(blocks)}, kBoundBlocks, centers,
                 spreads);
      for (int i = 0; i < heads; ++i) {
        const float* scores = centers + int64_t{i} * kBoundBlocks;
        s_.ctx.kernels->exp_sum(scores, spreads + int64_t{i} * kBoundBlocks, 1,
                                lse_[row.batch_row * s_.p.heads + head + i], blocks, masses);
        const int32_t* next = chosen;
        for (int b = 0; b < blocks; ++b) {
          if (*next == begin + b) {
            ++next;
          } else {  // a digest that says nothing bounds nothing
            left_out[i] += std::isnan(scores[b]) ? std::numeric_limits<float>::infinity() : masses[b];
          }
        }
      }
      while (*chosen < begin + blocks) ++chosen;
    }
    for (int i = 0; i < heads; ++i) {
      const float keys = left_out[i] * kKvBlockTokens;  // may be infinite
      bounds_[r * s_.p.heads + head + i] = 1 / (1 + 1 / keys);
    }
  }

  // What boxes say to `rows` queries: centers [rows][stride] and spreads likewise.
  void ScoreBoxes(const float* queries, const float* norms, int rows,
                  std::span<const std::byte* const> digests, int stride, float* centers,
                  float* spreads) const {
    s_.ctx.kernels->key_summary_scores({.q = queries,
                                        .q_stride = s_.p.cache.key_dim,
                                        .q_norms = norms,
                                        .summaries = digests.data(),
                                        .rows = rows,
                                        .count = static_cast<int>(digests.size()),
                                        .key_dim = s_.p.cache.key_dim,
                                        .key_split = KeySplit(s_.p.cache),
                                        .centers = centers,
                                        .spreads = spreads,
                                        .stride = stride});
  }

  float Largest(int64_t r, int kv_head) const {
    const float* bounds = bounds_ + r * s_.p.heads + kv_head * s_.group;
    return *std::max_element(bounds, bounds + s_.group);
  }

  void ListFallBacks() {
    const std::span<SequenceSlice> slices =
        s_.ctx.scratch->Take<SequenceSlice>(s_.rows.size() * s_.p.cache.heads);
    size_t used = 0;
    for (int64_t r = 0; r < std::ssize(s_.rows); ++r) {
      const SparseRow& row = s_.rows[r];
      const BlockSparsity& sparsity = *row.slice->sparsity;
      for (int h = 0; h < s_.p.cache.heads; ++h) {
        if (!Bounds(r, h)) continue;
        for (int i = 0; i < s_.group && sparsity.counters != nullptr; ++i) {
          sparsity.counters->bound.Add(bounds_[r * s_.p.heads + h * s_.group + i]);
        }
        if (sparsity.eps >= 1 || Largest(r, h) <= sparsity.eps) continue;
        slices[used++] = s_.SliceOf(row, h, row.slice->block_table, row.blocks() + 1);
        if (sparsity.counters == nullptr) continue;
        ++sparsity.counters->dense_fallbacks;
        sparsity.counters->blocks_read += row.blocks() + 1;
      }
    }
    params_ = s_.p;
    params_.sequences = slices.first(used);
  }

  // Audited heads attend densely beside their result.
  void ListAudits() {
    for (const SparseRow& row : s_.rows) {
      if (row.audited >= 0) audited_.push_back(&row);
    }
    const auto count = static_cast<int64_t>(audited_.size());
    params_ = s_.p;
    params_.sequences = {};
    if (count == 0) return;
    auto* queries = s_.Take<float>(count * s_.p.q_stride);
    const int64_t out_row = int64_t{s_.p.heads} * s_.p.cache.value_dim;
    auto* slices = s_.Take<SequenceSlice>(count);
    params_.q = queries;
    params_.out = s_.Take<float>(count * out_row);
    params_.out_stride = out_row;
    params_.lse = s_.Take<float>(count * s_.p.heads);
    params_.sequences = {slices, audited_.size()};
    for (int64_t i = 0; i < count; ++i) {
      const SparseRow& row = *audited_[i];
      const int64_t width = int64_t{s_.p.heads} * s_.p.cache.key_dim;
      std::copy_n(s_.p.q + row.batch_row * s_.p.q_stride, width, queries + i * s_.p.q_stride);
      slices[i] = s_.SliceOf(row, row.audited, row.slice->block_table, row.blocks() + 1);
      slices[i].row = static_cast<int>(i);
    }
  }

  // Compares the masses of both.
  void CompareAudits() {
    for (size_t i = 0; i < audited_.size(); ++i) {
      const SparseRow& row = *audited_[i];
      for (int g = 0; g < s_.group; ++g) {
        const int head = row.audited * s_.group + g;
        const double kept =
            std::exp(double{lse_[row.batch_row * s_.p.heads + head]} - params_.lse[i * s_.p.heads + head]);
        row.slice->sparsity->counters->missed.Add(std::max(0.0, 1 - kept));
      }
    }
  }

  const SparseRows& s_;
  const float* lse_;  // [batch rows][heads] of the chosen blocks
  float* bounds_;     // [rows][heads]
  float* queries_;    // [workers][kTaskHeads][key_dim], then [kTaskHeads][2]
  float* masses_;     // [workers][kBoundBlocks]
  Stage next_ = Stage::kFallBack;
  AttentionParams params_;                 // of the next Attend
  std::vector<const SparseRow*> audited_;  // [rows of params_ while it audits]
};

}  // namespace

std::unique_ptr<RestOfRows> BoundError(const SparseRows& s, const float* lse) {
  return std::make_unique<Certificate>(s, lse);
}

}  // namespace moesaic::kernels
