// Attention over chosen blocks. For each row and KV head: estimates of all blocks' masses from the sketches
// of their keys, the choice of the best, ordinary attention over a shorter block table, and, where it is
// wanted, a bound of what was left out, from the boxes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/round.h"
#include "kernels/block_sparsity.h"
#include "kernels/kv_layer.h"
#include "kernels/sketch.h"

namespace moesaic::kernels {
namespace {

// Scores of rows that are worked on at once, and their sketched queries, take at most this, about a share of
// a last-level cache: 256 rows of 64 heads at a context of 16,384.
constexpr int64_t kScoreFloats = 4 << 20;
// Query heads of a scoring task: all of the largest MLA models, so that each digest is unpacked once for all.
constexpr int kTaskHeads = 128;
// Blocks of a scoring task, at most, and in steps of this: copying queries costs about as much as meeting a
// few blocks, so that fewer tasks are better as long as everybody has some.
constexpr int kTaskBlocks = 512, kBlockStep = 32;
constexpr int kTasksPerWorker = 2;
// Blocks whose bounds a worker has at once: those of kTaskHeads heads fit into a second-level cache.
constexpr int kBoundBlocks = 128;
constexpr int kRowStep = 8;    // micro-kernels read whole groups of rows
constexpr int kTileRows = 16;  // likewise of sketches' queries
// Without sketches, the mass of a block is estimated as if one key stood this far from the center towards the
// farthest point that the box allows. Perplexity of SmolLM2-135M with a budget of 512 in windows of 4,096
// (WikiText-2, the first) was 14.29, 14.22, 14.21, 14.27 and 14.61 for 0, 0.1, 0.2, 0.5 and 1, dense 13.21.
constexpr float kEstimateSpread = 0.2F;

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

// The largest x[i]; NaN is passed by.
float LargestOf(const float* x, int count) {
  float largest[kLanes];
  std::fill_n(largest, kLanes, -std::numeric_limits<float>::infinity());
  for (int i = 0; i < count; i += kLanes) {
    const int lanes = std::min(count - i, kLanes);
    for (int j = 0; j < lanes; ++j) largest[j] = x[i + j] > largest[j] ? x[i + j] : largest[j];
  }
  return *std::max_element(largest, largest + kLanes);
}

struct Row {
  const SequenceSlice* slice;
  int position;
  int64_t batch_row;
  int audited = -1;    // the KV head that is held against dense attention
  int64_t choice = 0;  // the row of this batch whose choice stands for this one
  bool keeps = false;  // what was chosen is that of a row of a step before
  int blocks() const { return position / kKvBlockTokens; }  // before the current one
  int most() const { return std::min(slice->sparsity->budget_blocks, blocks() + 1); }  // that it reads
};

// Sketched queries of a KV head.
int PaddedGroup(const AttentionParams& p) { return base::RoundUp(p.heads / p.cache.heads, kTileRows); }

// What a row that chooses takes: a score of each block and, with sketches, its queries with scales and sums.
int64_t RowFloats(const AttentionParams& p, int blocks) {
  int64_t floats = int64_t{p.heads} * blocks;
  if (p.cache.sketches) {
    const SketchLayout layout = SketchLayoutOf(p.cache.key_dim, KeySplit(p.cache));
    floats += int64_t{p.cache.heads} * PaddedGroup(p) * ((layout.width[0] + layout.width[1]) / 4 + 4);
  }
  return floats;
}

class SparseRows {
 public:
  SparseRows(const ExecContext& ctx, const AttentionParams& params, std::span<Row> rows)
      : ctx_(ctx),
        p_(params),
        rows_(rows),
        group_(params.heads / params.cache.heads),
        task_heads_(std::min(group_, kTaskHeads)),
        padded_(PaddedGroup(params)),
        sketches_(SketchLayoutOf(params.cache.key_dim, KeySplit(params.cache))),
        sketch_width_(sketches_.width[0] + sketches_.width[1]) {
    for (const Row& row : rows) {
      stride_ = std::max(stride_, base::RoundUp(row.blocks(), kLanes));
      budget_ = std::max(budget_, row.most());
      if (row.slice->sparsity->cold != nullptr) cold_ = row.slice->sparsity->cold;
    }
    const auto count = static_cast<int64_t>(rows.size());
    scores_ = Take<float>(count * p_.heads * stride_);
    chosen_ = Take<int32_t>(count * p_.cache.heads * budget_);
    tables_ = Take<int32_t>(count * p_.cache.heads * budget_);
    choices_ = Take<BlockChoice>(count * p_.cache.heads);
    choosing_ = Take<int64_t>(count);
    importance_ = Take<float>(int64_t{2} * stride_ * ctx.pool->size());
    if (!params.cache.sketches) spreads_ = Take<float>(int64_t{task_heads_} * stride_ * ctx.pool->size());
    queries_ = Take<float>(int64_t{kTaskHeads} * (p_.cache.key_dim + 2) * ctx.pool->size());
  }

  // Scores all blocks, chooses, and attends; `dense` slices come along.
  void Run(std::span<const SequenceSlice> dense) {
    FindChoosers();
    SketchQueries();
    Score();
    Choose();
    Keep();
    Attend(dense);
    if (lse_ == nullptr) return;
    Bound();
    FallBack();
    Audit();
  }

 private:
  template <typename T>
  T* Take(int64_t count) {
    return ctx_.scratch->Take<T>(static_cast<size_t>(count)).data();
  }
  // As Attention; `slices` are those that choose, which read what may not be in memory yet.
  void AttendOver(const AttentionParams& params, std::span<const SequenceSlice> slices) const {
    if (cold_ != nullptr) cold_->Need(p_.cache, slices);
    Attention(ctx_, params);
  }
  int64_t Pair(int64_t row, int kv_head) const { return row * p_.cache.heads + kv_head; }
  int64_t Scores(int64_t row, int head) const { return (row * p_.heads + head) * stride_; }
  // Whether a bound is wanted. An audit has one of what was chosen by the row itself.
  bool Bounds(int64_t r, int kv_head) const {
    return rows_[r].slice->sparsity->eps < 1 || (Chooses(r) && rows_[r].audited == kv_head);
  }

  // Says whose choice each row reads.
  void FindChoosers() {
    for (int64_t r = 0; r < std::ssize(rows_); ++r) {
      Row& row = rows_[r];
      const BlockSparsity& sparsity = *row.slice->sparsity;
      const int chooser = sparsity.ChooserOf(row.position);
      row.choice = r;
      if (chooser != row.position) {
        const Row* before = r > 0 ? &rows_[r - 1] : nullptr;
        if (before != nullptr && before->slice == row.slice &&
            sparsity.ChooserOf(before->position) == chooser) {
          row.choice = before->choice;
        } else {  // it chooses after all where nobody knows any more
          row.keeps = sparsity.kept != nullptr && FindKept(r, chooser);
        }
      }
      if (Chooses(r)) choosing_[choosing_count_++] = r;
    }
  }
  bool Chooses(int64_t r) const { return rows_[r].choice == r && !rows_[r].keeps; }

  bool FindKept(int64_t r, int chooser) {
    const BlockSparsity& sparsity = *rows_[r].slice->sparsity;
    for (int h = 0; h < p_.cache.heads; ++h) {
      const std::span<const int32_t> places = sparsity.kept->Find(p_.cache.index, h, chooser);
      if (places.empty() || std::ssize(places) > rows_[r].most()) return false;
      std::ranges::copy(places, chosen_ + Pair(r, h) * budget_);
      choices_[Pair(r, h)] = {.count = static_cast<int>(places.size()), .captured = true};
      FillTable(r, h);
    }
    return true;
  }

  void FillTable(int64_t r, int kv_head) {
    const int64_t pair = Pair(r, kv_head);
    for (int i = 0; i < choices_[pair].count; ++i) {
      tables_[pair * budget_ + i] = rows_[r].slice->block_table[chosen_[pair * budget_ + i]];
    }
  }

  // For rows of steps to come.
  void Keep() {
    for (int64_t r = 0; r < std::ssize(rows_); ++r) {
      const BlockSparsity& sparsity = *rows_[r].slice->sparsity;
      if (sparsity.reuse == 1 || sparsity.kept == nullptr || !Chooses(r)) continue;
      for (int h = 0; h < p_.cache.heads; ++h) {
        const int64_t pair = Pair(r, h);
        sparsity.kept->Put(p_.cache.index, h, sparsity.ChooserOf(rows_[r].position),
                           {chosen_ + pair * budget_, static_cast<size_t>(choices_[pair].count)});
      }
    }
  }

  // The queries of the rows that choose, as sketches want them.
  void SketchQueries() {
    if (!p_.cache.sketches) return;
    const int64_t pairs = choosing_count_ * p_.cache.heads;
    sketched_ = Take<int8_t>(pairs * padded_ * sketch_width_);
    sketch_scales_ = Take<float>(pairs * padded_ * 2);
    sketch_sums_ = Take<int32_t>(pairs * padded_ * 2);
    const int parts = base::CeilDiv(group_, kTileRows);
    ctx_.pool->Run(pairs * parts, [&](int64_t task, int worker) {
      const int64_t pair = task / parts;
      const auto first = static_cast<int>(task % parts) * kTileRows;
      const int heads = std::min(group_ - first, kTileRows);
      const Row& row = rows_[choosing_[pair / p_.cache.heads]];
      float* queries = Queries(worker);
      LoadQueries(row, static_cast<int>(pair % p_.cache.heads) * group_ + first, heads, queries);
      const int64_t to = pair * padded_ + first;
      for (int i = 0; i < heads; ++i) {
        SketchQuery(queries + int64_t{i} * p_.cache.key_dim, p_.cache.key_dim, KeySplit(p_.cache),
                    sketched_ + (to + i) * sketch_width_, sketch_scales_ + 2 * (to + i),
                    sketch_sums_ + 2 * (to + i));
      }
    });
  }

  // Digests of a block's KV heads stand beside each other, blocks a page or more apart: a task takes all
  // heads of a few blocks before the next.
  void Score() {
    if (choosing_count_ == 0) return;
    const int head_parts = base::CeilDiv(group_, kTaskHeads);
    const int64_t rows = choosing_count_ * head_parts;
    const int64_t wanted = base::CeilDiv(kTasksPerWorker * ctx_.pool->size(), rows);
    const int64_t share = base::CeilDiv(stride_, wanted);  // at least 1, however many workers there are
    const auto part = static_cast<int>(std::min<int64_t>(base::RoundUp(share, kBlockStep), kTaskBlocks));
    const int block_parts = base::CeilDiv(stride_, part);
    const int together = p_.cache.heads > 1 ? kBlockStep : part;
    ctx_.pool->Run(rows * block_parts, [&](int64_t task, int worker) {
      const int64_t choosing = task / block_parts / head_parts;
      const auto first_head = static_cast<int>(task / block_parts % head_parts) * kTaskHeads;
      const auto first_block = static_cast<int>(task % block_parts) * part;
      const int end = std::min(rows_[choosing_[choosing]].blocks(), first_block + part);
      for (int block = first_block; block < end; block += together) {
        for (int h = 0; h < p_.cache.heads; ++h) {
          ScorePart(choosing, h, first_head, block, std::min(together, end - block), worker);
        }
      }
    });
  }

  // Of a row that chooses.
  void ScorePart(int64_t choosing, int kv_head, int first_head, int first_block, int blocks,
                 int worker) const {
    const KvLayer& cache = p_.cache;
    const int64_t r = choosing_[choosing];
    const Row& row = rows_[r];
    const int heads = std::min(group_ - first_head, kTaskHeads);
    const int head = kv_head * group_ + first_head;
    float* const queries = Queries(worker);
    const float* norms = LoadQueries(row, head, heads, queries);
    const std::byte* digests[kTaskBlocks];
    FindDigests(row, kv_head, first_block, blocks, digests);
    float* scores = scores_ + Scores(r, head) + first_block;
    if (!cache.sketches) {
      float* const spreads = spreads_ + worker * int64_t{task_heads_} * stride_;
      ScoreBoxes(queries, norms, heads, {digests, static_cast<size_t>(blocks)}, stride_, scores, spreads);
      for (int64_t i = 0; i < heads * stride_; i += stride_) {
        for (int b = 0; b < blocks; ++b) scores[i + b] += kEstimateSpread * spreads[i + b];
      }
      return;
    }
    ScoreBoxes(queries, nullptr, heads, {digests, static_cast<size_t>(blocks)}, stride_, scores, nullptr);
    const int64_t from = (choosing * cache.heads + kv_head) * padded_ + first_head;
    ctx_.kernels->sketch_scores({.q = sketched_ + from * sketch_width_,
                                 .q_stride = sketch_width_,
                                 .q_scales = sketch_scales_ + 2 * from,
                                 .q_sums = sketch_sums_ + 2 * from,
                                 .digests = digests,
                                 .rows = heads,
                                 .count = blocks,
                                 .layout = sketches_,
                                 .scores = scores,
                                 .stride = stride_});
  }

  void FindDigests(const Row& row, int kv_head, int first, int count, const std::byte** digests) const {
    const KvLayer& cache = p_.cache;
    for (int b = 0; b < count; ++b) {
      digests[b] = cache.base + row.slice->block_table[first + b] * cache.block_stride + cache.digest_offset +
                   kv_head * DigestBytes(cache);
    }
  }

  float* Queries(int worker) const {
    return queries_ + worker * int64_t{kTaskHeads} * (p_.cache.key_dim + 2);
  }

  // Scaled queries of `count` heads, whole groups of kRowStep, and behind kTaskHeads of them the lengths of
  // their parts, which it returns.
  const float* LoadQueries(const Row& row, int head, int count, float* queries) const {
    const int dim = p_.cache.key_dim, split = KeySplit(p_.cache);
    float* const norms = queries + int64_t{kTaskHeads} * dim;
    const float* from = p_.q + row.batch_row * p_.q_stride + int64_t{head} * dim;
    for (int i = 0; i < count; ++i, queries += dim, from += dim) {
      norms[2 * i] = std::sqrt(ScaleAndSquare(from, p_.scale, split, queries)) * kNormSlack;
      norms[2 * i + 1] =
          std::sqrt(ScaleAndSquare(from + split, p_.scale, dim - split, queries + split)) * kNormSlack;
    }
    const int idle = base::RoundUp(count, kRowStep) - count;
    std::fill_n(queries, int64_t{idle} * dim, 0.0F);
    std::fill_n(norms + 2 * count, 2 * idle, 0.0F);
    return norms;
  }

  void Choose() {
    ctx_.pool->Run(choosing_count_ * p_.cache.heads, [&](int64_t task, int worker) {
      const int64_t r = choosing_[task / p_.cache.heads];
      const auto kv_head = static_cast<int>(task % p_.cache.heads);
      const int64_t pair = Pair(r, kv_head);
      float* importance = importance_ + int64_t{2} * stride_ * worker;
      Importance(r, kv_head, importance);
      choices_[pair] = ChooseBlocks(importance, rows_[r].position, rows_[r].most(),
                                    rows_[r].slice->sparsity->mass, chosen_ + pair * budget_);
      FillTable(r, kv_head);
    });
  }

  // The mean over the group's query heads of each block's share of the estimated softmax mass.
  void Importance(int64_t r, int kv_head, float* importance) const {
    const int blocks = rows_[r].blocks();
    float* masses = importance + stride_;
    std::fill_n(importance, blocks, 0.0F);
    for (int i = 0; i < group_; ++i) {
      const float* scores = scores_ + Scores(r, kv_head * group_ + i);
      const float sum = ctx_.kernels->exp_sum(scores, scores, 0, LargestOf(scores, blocks), blocks, masses);
      ctx_.kernels->axpy(1 / sum, masses, blocks, importance);
    }
    // A digest that says nothing: its block is read.
    const float* scores = scores_ + Scores(r, kv_head * group_);
    for (int b = 0; b < blocks; ++b) {
      if (std::isnan(scores[b])) importance[b] = scores[b];
    }
  }

  // One token's slice for one KV head, over a block table of its own.
  SequenceSlice SliceOf(const Row& row, int kv_head, const int32_t* table, int blocks) const {
    return {.block_table = table,
            .start = (blocks - 1) * kKvBlockTokens + row.position % kKvBlockTokens,
            .count = 1,
            .row = static_cast<int>(row.batch_row),
            .kv_head = kv_head};
  }

  void Attend(std::span<const SequenceSlice> dense) {
    const size_t pairs = rows_.size() * p_.cache.heads;
    const std::span<SequenceSlice> slices = ctx_.scratch->Take<SequenceSlice>(dense.size() + pairs);
    std::copy(dense.begin(), dense.end(), slices.begin());
    size_t used = dense.size();
    bool bounds = false;
    int64_t last_row = 0;
    for (int64_t r = 0; r < std::ssize(rows_); ++r) {
      const BlockSparsity& sparsity = *rows_[r].slice->sparsity;
      ChooseAudit(r);
      bounds |= sparsity.eps < 1 || rows_[r].audited >= 0;
      last_row = std::max(last_row, rows_[r].batch_row);
      for (int h = 0; h < p_.cache.heads; ++h) {
        const int64_t pair = Pair(rows_[r].choice, h);
        slices[used++] = SliceOf(rows_[r], h, tables_ + pair * budget_, choices_[pair].count);
      }
    }
    for (const SequenceSlice& s : dense) last_row = std::max<int64_t>(last_row, s.row + s.count - 1);
    AttentionParams params = p_;
    params.sequences = slices;
    if (bounds) params.lse = lse_ = Take<float>((last_row + 1) * p_.heads);
    AttendOver(params, slices.subspan(dense.size()));
  }

  // Whether one of the row's KV heads is audited, and which; counts what it chose.
  void ChooseAudit(int64_t r) const {
    Row& row = rows_[r];
    const BlockSparsity& sparsity = *row.slice->sparsity;
    if (sparsity.counters == nullptr) return;
    const int heads = p_.cache.heads;
    SparsityCounters& counters = *sparsity.counters;
    if (sparsity.audit_every > 0) {
      const int64_t every = sparsity.audit_every;
      const int64_t due = base::RoundUp(counters.selections, every);
      if (due < counters.selections + heads) row.audited = static_cast<int>(due - counters.selections);
    }
    counters.selections += heads;
    if (!Chooses(r)) {
      counters.reused += heads;
    } else if (sparsity.ChooserOf(row.position) != row.position) {
      counters.rechosen += heads;
    }
    for (int h = 0; h < heads; ++h) {
      const BlockChoice& choice = choices_[Pair(row.choice, h)];
      counters.blocks_read += choice.count;
      counters.capped += choice.captured ? 0 : 1;
    }
    counters.blocks_all += int64_t{heads} * (row.blocks() + 1);
  }

  // Of each query head whose bound is wanted, the share of the mass that was left out, at most.
  void Bound() {
    bounds_ = Take<float>(static_cast<int64_t>(rows_.size()) * p_.heads);
    const int64_t room = int64_t{2} * task_heads_ * kBoundBlocks;
    auto* const boxes = Take<float>(room * ctx_.pool->size());
    ctx_.pool->Run(static_cast<int64_t>(rows_.size()) * p_.cache.heads, [&](int64_t pair, int worker) {
      const int64_t r = pair / p_.cache.heads;
      const auto kv_head = static_cast<int>(pair % p_.cache.heads);
      if (!Bounds(r, kv_head)) return;
      for (int first = 0; first < group_; first += kTaskHeads) {
        BoundHeads(r, kv_head, first, boxes + room * worker, worker);
      }
    });
  }

  // Of up to kTaskHeads of the KV head's query heads. `centers` has room for two numbers of each and a block.
  void BoundHeads(int64_t r, int kv_head, int first, float* centers, int worker) const {
    const Row& row = rows_[r];
    const int heads = std::min(group_ - first, kTaskHeads), head = kv_head * group_ + first;
    float* const queries = Queries(worker);
    const float* norms = LoadQueries(row, head, heads, queries);
    float* const spreads = centers + int64_t{heads} * kBoundBlocks;
    float* const masses = importance_ + int64_t{2} * stride_ * worker;
    const int32_t* chosen = chosen_ + Pair(row.choice, kv_head) * budget_;  // the last is the current block
    float left_out[kTaskHeads] = {};
    for (int begin = 0; begin < row.blocks(); begin += kBoundBlocks) {
      const std::byte* digests[kBoundBlocks];
      const int blocks = std::min(row.blocks() - begin, kBoundBlocks);
      FindDigests(row, kv_head, begin, blocks, digests);
      ScoreBoxes(queries, norms, heads, {digests, static_cast<size_t>(blocks)}, kBoundBlocks, centers,
                 spreads);
      for (int i = 0; i < heads; ++i) {
        const float* scores = centers + int64_t{i} * kBoundBlocks;
        ctx_.kernels->exp_sum(scores, spreads + int64_t{i} * kBoundBlocks, 1,
                              lse_[row.batch_row * p_.heads + head + i], blocks, masses);
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
      bounds_[r * p_.heads + head + i] = 1 / (1 + 1 / keys);
    }
  }

  // What boxes say to `rows` queries: centers [rows][stride] and, unless null, spreads likewise.
  void ScoreBoxes(const float* queries, const float* norms, int rows,
                  std::span<const std::byte* const> digests, int stride, float* centers,
                  float* spreads) const {
    ctx_.kernels->digest_scores({.q = queries,
                                 .q_stride = p_.cache.key_dim,
                                 .q_norms = norms,
                                 .digests = digests.data(),
                                 .rows = rows,
                                 .count = static_cast<int>(digests.size()),
                                 .key_dim = p_.cache.key_dim,
                                 .key_split = KeySplit(p_.cache),
                                 .centers = centers,
                                 .spreads = spreads,
                                 .stride = stride});
  }

  float Largest(int64_t r, int kv_head) const {
    const float* bounds = bounds_ + r * p_.heads + kv_head * group_;
    return *std::max_element(bounds, bounds + group_);
  }

  void FallBack() {
    const std::span<SequenceSlice> slices = ctx_.scratch->Take<SequenceSlice>(rows_.size() * p_.cache.heads);
    size_t used = 0;
    for (int64_t r = 0; r < std::ssize(rows_); ++r) {
      const Row& row = rows_[r];
      const BlockSparsity& sparsity = *row.slice->sparsity;
      for (int h = 0; h < p_.cache.heads; ++h) {
        if (!Bounds(r, h)) continue;
        for (int i = 0; i < group_ && sparsity.counters != nullptr; ++i) {
          sparsity.counters->bound.Add(bounds_[r * p_.heads + h * group_ + i]);
        }
        if (sparsity.eps >= 1 || Largest(r, h) <= sparsity.eps) continue;
        slices[used++] = SliceOf(row, h, row.slice->block_table, row.blocks() + 1);
        if (sparsity.counters == nullptr) continue;
        ++sparsity.counters->dense_fallbacks;
        sparsity.counters->blocks_read += row.blocks() + 1;
      }
    }
    AttentionParams params = p_;
    params.sequences = slices.first(used);
    if (used > 0) AttendOver(params, params.sequences);
  }

  // Attends densely beside what was done, and compares the masses.
  void Audit() {
    std::vector<const Row*> audited;
    for (const Row& row : rows_) {
      if (row.audited >= 0) audited.push_back(&row);
    }
    const auto count = static_cast<int64_t>(audited.size());
    if (count == 0) return;
    auto* queries = Take<float>(count * p_.q_stride);
    const int64_t out_row = int64_t{p_.heads} * p_.cache.value_dim;
    auto* slices = Take<SequenceSlice>(count);
    AttentionParams params = p_;
    params.q = queries;
    params.out = Take<float>(count * out_row);
    params.out_stride = out_row;
    params.lse = Take<float>(count * p_.heads);
    params.sequences = {slices, audited.size()};
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = *audited[i];
      const int64_t width = int64_t{p_.heads} * p_.cache.key_dim;
      std::copy_n(p_.q + row.batch_row * p_.q_stride, width, queries + i * p_.q_stride);
      slices[i] = SliceOf(row, row.audited, row.slice->block_table, row.blocks() + 1);
      slices[i].row = static_cast<int>(i);
    }
    AttendOver(params, params.sequences);
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = *audited[i];
      for (int g = 0; g < group_; ++g) {
        const int head = row.audited * group_ + g;
        const double kept =
            std::exp(double{lse_[row.batch_row * p_.heads + head]} - params.lse[i * p_.heads + head]);
        row.slice->sparsity->counters->missed.Add(std::max(0.0, 1 - kept));
      }
    }
  }

  const ExecContext& ctx_;
  const AttentionParams& p_;
  const std::span<Row> rows_;
  const int group_;       // query heads of one KV head
  const int task_heads_;  // of these that are scored at once, at most
  const int padded_;      // group_, rounded up
  const SketchLayout sketches_;
  const int64_t sketch_width_;
  ColdSource* cold_ = nullptr;  // one for all, or null
  int stride_ = 0;              // blocks of the longest row, rounded up
  int budget_ = 0;              // blocks of the row that reads most
  float* scores_;               // [rows][heads][stride_]: logarithms of the blocks' masses, as estimated
  int32_t *chosen_, *tables_;   // [rows][KV heads][budget_]: blocks by place in the sequence, and by number
  BlockChoice* choices_;        // [rows][KV heads]
  int64_t* choosing_;           // rows
  int64_t choosing_count_ = 0;
  float* spreads_ = nullptr;        // [workers][task_heads_][stride_], where there are no sketches
  int8_t* sketched_ = nullptr;      // [choosing rows][KV heads][padded_][sketch_width_]
  float* sketch_scales_ = nullptr;  // likewise [2]
  int32_t* sketch_sums_ = nullptr;  // likewise [2]
  float* importance_;               // [workers][2][stride_]
  float* queries_;                  // [workers][kTaskHeads][key_dim], then [kTaskHeads][2]
  float* lse_ = nullptr;            // [batch rows][heads] of the chosen blocks, if anybody asks for bounds
  float* bounds_ = nullptr;         // [rows][heads]
};

}  // namespace

void SparseAttention(const ExecContext& ctx, const AttentionParams& params) {
  MOESAIC_CHECK(params.lse == nullptr);
  const KvLayer& cache = params.cache;
  if (std::none_of(params.sequences.begin(), params.sequences.end(), [&](const SequenceSlice& s) {
        return s.count > 0 && ChoosesBlocks(s, cache, s.count - 1);
      })) {
    NeedDense(ctx, cache, params.sequences);
    return Attention(ctx, params);
  }
  const size_t mark = ctx.scratch->Mark();
  const std::span<const SequenceSlice> cut = CutAtFirstChoice(ctx, cache, params.sequences);
  const std::span<SequenceSlice> dense = ctx.scratch->Take<SequenceSlice>(cut.size());
  size_t dense_count = 0, count = 0;
  for (const SequenceSlice& s : cut) count += s.sparsity == nullptr ? 0 : s.count;
  const std::span<Row> rows = ctx.scratch->Take<Row>(count);
  count = 0;
  int most_blocks = 1;
  for (const SequenceSlice& s : cut) {
    if (s.sparsity == nullptr) {
      dense[dense_count++] = s;
      continue;
    }
    MOESAIC_CHECK_LE(kLeastSparseBlocks, s.sparsity->budget_blocks);
    for (int i = 0; i < s.count; ++i) rows[count++] = {&s, s.start + i, s.row + i};
    most_blocks = std::max(most_blocks, (s.start + s.count) / kKvBlockTokens);
  }
  std::span<const SequenceSlice> along = dense.first(dense_count);
  const auto at_once =
      static_cast<size_t>(std::max<int64_t>(kScoreFloats / RowFloats(params, most_blocks), 1));
  for (size_t first = 0; first < rows.size(); first += at_once) {
    const size_t inner = ctx.scratch->Mark();
    SparseRows(ctx, params, rows.subspan(first, std::min(at_once, rows.size() - first))).Run(along);
    along = {};
    ctx.scratch->Rewind(inner);
  }
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
