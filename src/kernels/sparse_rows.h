// Rows that choose blocks, while SparseAttention works on them: what choosing (sparse_choice.cc), attending
// (sparse_attention.cc) and bounding (sparse_certificate.cc) share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/block_sparsity.h"
#include "kernels/kv_layer.h"

namespace moesaic::kernels {

struct SparseRow {
  const SequenceSlice* slice;
  int position;
  int64_t batch_row;
  int audited = -1;    // the KV head that is held against dense attention
  int64_t choice = 0;  // the row of this batch whose choice stands for this one
  bool keeps = false;  // what was chosen is that of a row of a step before
  int blocks() const { return position / kKvBlockTokens; }  // before the current one
  int most() const { return std::min(slice->sparsity->budget_blocks, blocks() + 1); }  // that it reads
  const BlockSparsity& sparsity() const { return *slice->sparsity; }
};

/// Blocks are scored in whole groups of these.
inline constexpr int kScoredBlocks = 16;

struct SparseRows {
  const ExecContext& ctx;
  const AttentionParams& p;
  std::span<SparseRow> rows;
  int group;       // query heads of one KV head
  int stride = 0;  // blocks of the longest row, rounded up
  int budget = 0;  // blocks of the row that reads most
  // [rows][KV heads][budget]: blocks by place in the sequence, and by number.
  int32_t *chosen = nullptr, *tables = nullptr;
  BlockChoice* choices = nullptr;  // [rows][KV heads]

  SparseRows(const ExecContext& ctx, const AttentionParams& params, std::span<SparseRow> rows);

  template <typename T>
  T* Take(int64_t count) const {
    return ctx.scratch->Take<T>(static_cast<size_t>(count)).data();
  }
  int64_t Pair(int64_t row, int kv_head) const { return row * p.cache.heads + kv_head; }
  int64_t pairs() const { return std::ssize(rows) * p.cache.heads; }
  /// Whether the row chooses for itself.
  bool Chooses(int64_t r) const { return rows[r].choice == r && !rows[r].keeps; }

  /// Digests of the row's blocks [first, first + count).
  void FindDigests(const SparseRow& row, int kv_head, int first, int count, const std::byte** digests) const;
  /// One token's slice for one KV head, over a block table of its own.
  SequenceSlice SliceOf(const SparseRow& row, int kv_head, const int32_t* table, int blocks) const;
};

/// What a row that chooses takes in floats, of so many blocks.
int64_t ChoiceFloats(const AttentionParams& params, int blocks);

/// Chooses the blocks of all rows, or takes over what was chosen before: fills `choices`, `chosen` and
/// `tables`.
void ChooseForRows(SparseRows* s);

/// Attention that rows need after they have attended over their chosen blocks.
class RestOfRows {
 public:
  virtual ~RestOfRows() = default;
  /// The slices that Attend reads next; none: all is done. Attend must follow before the next call.
  virtual std::span<const SequenceSlice> Next() = 0;
  virtual void Attend() = 0;
};

/// Bounds, by lse [batch rows][heads] of the chosen blocks, the mass that was left out. Heads for which that
/// is too much attend densely, and audited ones beside their result. `s` is borrowed.
std::unique_ptr<RestOfRows> BoundError(const SparseRows& s, const float* lse);

}  // namespace moesaic::kernels
