// State of a group of rows that choose blocks, shared by the choice (sparse_choice.cc), attention
// (sparse_attention.cc) and audits (sparse_audit.cc).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/block_sparsity.h"
#include "kernels/kv_layer.h"

namespace moesaic::kernels {

struct SparseRow {
  const SequenceSlice* slice;
  int position;
  int64_t batch_row;
  int audited = -1;    // KV head that is compared with dense attention; -1: none
  int64_t choice = 0;  // row of this group whose choice this row reads
  bool keeps = false;  // the choice is that of a row of an earlier step
  int blocks() const { return position / kKvBlockTokens; }  // full blocks before the current one
  int budget() const { return settings().budget_blocks; }
  const RowSparsity& sparsity() const { return *slice->sparsity; }
  const SparsitySettings& settings() const { return slice->sparsity->settings; }
};

/// Blocks are scored in groups of this size.
inline constexpr int kScoredBlocks = 16;

struct SparseRows {
  const ExecContext& ctx;
  const AttentionParams& p;
  std::span<SparseRow> rows;
  int group;       // query heads per KV head
  int stride = 0;  // full blocks of the longest row, rounded up to kScoredBlocks
  int budget = 0;  // maximum budget of a row
  // [rows][KV heads][budget]: chosen blocks by their position in the sequence, and by their number.
  int32_t *chosen = nullptr, *tables = nullptr;

  SparseRows(const ExecContext& ctx, const AttentionParams& params, std::span<SparseRow> rows);

  template <typename T>
  T* Take(int64_t count) const {
    return ctx.scratch->Take<T>(static_cast<size_t>(count)).data();
  }
  int64_t Pair(int64_t row, int kv_head) const { return row * p.cache.heads + kv_head; }
  int64_t pairs() const { return std::ssize(rows) * p.cache.heads; }
  /// Returns true if the row makes its own choice.
  bool Chooses(int64_t r) const { return rows[r].choice == r && !rows[r].keeps; }

  /// Finds the key summaries of the row's blocks [first, first + count).
  void FindKeySummaries(const SparseRow& row, int kv_head, int first, int count,
                        const std::byte** summaries) const;
  /// Returns a slice of one token and KV head over its own block table.
  SequenceSlice SliceOf(const SparseRow& row, int kv_head, const int32_t* table, int blocks) const;
  /// Returns a slice of the row's audited head over all blocks.
  SequenceSlice AuditOf(const SparseRow& row) const {
    return SliceOf(row, row.audited, row.slice->block_table, row.blocks() + 1);
  }
};

/// Returns the floats that a row of that many blocks needs to choose.
int64_t ChoiceFloats(const AttentionParams& params, int blocks);

/// Fills `chosen` and `tables` of all rows, from their own choices or from earlier ones.
void ChooseForRows(SparseRows* s);

/// Computes dense attention of audited heads and counts the mass that their choices omit. `lse` [batch
/// rows][heads] is that of the chosen blocks.
void AuditRows(const SparseRows& s, const float* lse);

}  // namespace moesaic::kernels
