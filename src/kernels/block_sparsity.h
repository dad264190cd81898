// Block-sparse attention: each row attends to the blocks of its sequence that have most of its softmax mass,
// estimated from summaries of their keys. Nothing is evicted: every row chooses from all blocks.
// docs/contracts/sparsity.md is normative.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "kernels/attention.h"
#include "kernels/kept_choices.h"

namespace moesaic::kernels {

/// Number of blocks that every row reads: the first one, where attention sinks are, the one before the
/// current, and the current one, which has no key summary.
inline constexpr int kKeptBlocks = 3;
inline constexpr int kMinSparseBlocks = kKeptBlocks + 1;  ///< smallest budget: one block is chosen

/// Histogram of shares of softmax mass.
struct MassHistogram {
  static constexpr std::array<double, 8> kBounds = {1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 1};
  std::array<int64_t, kBounds.size()> counts = {};  ///< by bucket; its bound is inclusive
  double sum = 0;
  void Add(double share);
  int64_t count() const;
  /// Returns the bound of the bucket that contains the quantile; 0 if the histogram is empty.
  double Quantile(double part) const;
};

/// Totals of block-sparse attention since the counters were created, in pairs of a row and a KV head.
struct SparsityCounters {
  int64_t selections = 0;   // pairs with a choice, their own or that of an earlier row
  int64_t reused = 0;       // selections that use the choice of an earlier row
  int64_t rechosen = 0;     // selections computed because the earlier row's choice was not stored any more
  int64_t blocks_read = 0;  // blocks read by selections
  int64_t blocks_all = 0;   // blocks that dense attention would have read for them
  MassHistogram missed;     // mass that the choice omits, for each query head of audited pairs
};

/// Settings of the rows of a sequence, for all layers of a step.
struct SparsitySettings {
  int budget_blocks = 0;   // number of blocks that a row reads, including kKeptBlocks
  int first_position = 0;  // rows at earlier positions read all blocks
  // Number of adjacent rows, in [1, kKvBlockTokens], that read the choice of the first one. Groups begin at
  // the beginning of each block of the sequence.
  int reuse = 1;
  // One of this many selections of the counters, at most one KV head of a row, is compared with dense
  // attention. That changes no result. 0: none.
  int audit_every = 0;

  /// Returns the first position whose row may omit a block.
  int first_sparse() const {
    const int filled = budget_blocks * kKvBlockTokens;
    return first_position > filled ? first_position : filled;
  }
  /// Returns the position of the row whose choice the row at `position` reads; `position` if it chooses
  /// itself.
  int ChooserOf(int position) const {
    const int slot = position % kKvBlockTokens;
    const int first = position - slot % reuse;
    return first > first_sparse() ? first : first_sparse();
  }
  /// Returns the end of the group of `position`.
  int GroupEnd(int position) const {
    const int slot = position % kKvBlockTokens;
    const int end = slot - slot % reuse + reuse;
    return position - slot + (end < kKvBlockTokens ? end : kKvBlockTokens);
  }

  bool operator==(const SparsitySettings&) const = default;
};

/// Settings and borrowed state of the rows of a slice. The calling thread writes the state.
struct RowSparsity {
  SparsitySettings settings = {};
  KeptChoices* kept = nullptr;           // choices of the sequence if settings.reuse > 1
  SparsityCounters* counters = nullptr;  // null: nothing is counted
};

/// Returns true if row `row` of `slice` chooses blocks in this layer.
inline bool ChoosesBlocks(const SequenceSlice& slice, const KvLayer& cache, int row) {
  return slice.sparsity != nullptr && cache.key_summaries != nullptr &&
         slice.start + row >= slice.sparsity->settings.first_sparse();
}

/// Splits slices at the first row that chooses blocks, so that all rows of a slice have `sparsity` or none
/// has. The result is allocated from ctx.scratch if any slice has `sparsity`.
std::span<const SequenceSlice> CutAtFirstChoice(const ExecContext& ctx, const KvLayer& cache,
                                                std::span<const SequenceSlice> sequences);

/// Builds the key summaries of all blocks that the slices' tokens fill. KvWrite must be called first. Does
/// nothing if the layer has no summaries.
struct BuildKeySummariesParams {
  KvLayer cache;
  std::span<const SequenceSlice> sequences;
};
void BuildKeySummaries(const ExecContext& ctx, const BuildKeySummariesParams& params);

struct SparseRow;
struct SparseRows;

/// Attention in which rows of slices with `sparsity` choose their blocks. The choice of a row depends only on
/// its own query heads of a KV head, its position and the key summaries, so it is the same in every batch,
/// chunk and draft. Rows that read all blocks get the same bits as from Attention.
///
/// The pass stops before it reads blocks, so that its caller can fetch those that are not in memory:
///
///   SparseAttentionPass pass(ctx, params);
///   while (pass.ChooseBlocks()) {
///     Fetch(pass.reads());
///     pass.AttendChosen();
///   }
class SparseAttentionPass {
 public:
  /// `ctx` and the memory that `params` refers to are borrowed. params.lse must be null.
  SparseAttentionPass(const ExecContext& ctx, const AttentionParams& params);
  ~SparseAttentionPass();
  SparseAttentionPass(const SparseAttentionPass&) = delete;
  SparseAttentionPass& operator=(const SparseAttentionPass&) = delete;

  /// Chooses the blocks of the next group of rows. Returns false if all rows have been computed.
  bool ChooseBlocks();
  /// Returns the slices whose blocks AttendChosen() reads: the chosen blocks, and all blocks of dense rows
  /// and of audited heads.
  std::span<const SequenceSlice> reads() const { return reads_; }
  /// Attends over the blocks of reads(). Must follow each call of ChooseBlocks that returns true.
  void AttendChosen();

 private:
  void ListReads(std::span<const SequenceSlice> dense);

  const ExecContext& ctx_;
  const AttentionParams params_;
  const size_t mark_;                     // scratch memory before the pass
  size_t group_mark_;                     // scratch memory before the group
  std::span<const SequenceSlice> dense_;  // slices that read all blocks, until they are listed in reads_
  std::span<SparseRow> rows_;             // rows that choose
  size_t rows_per_group_ = 0, next_row_ = 0;
  bool started_ = false;
  std::unique_ptr<SparseRows> group_;
  size_t audited_ = 0;    // trailing slices of reads_ that audits read
  int64_t last_row_ = 0;  // maximum batch row of reads_
  std::span<const SequenceSlice> reads_;
};

/// Runs a whole pass, for callers whose blocks are all in memory.
void SparseAttention(const ExecContext& ctx, const AttentionParams& params);

/// Writes the blocks that a row at `position` reads to `chosen` [budget], in ascending order: kKeptBlocks and
/// the others of the greatest importance [position / 64]. Ties go to the later block, and NaN is greater than
/// any number. kMinSparseBlocks <= budget <= position / 64 + 1.
void ChooseBlocks(const float* importance, int position, int budget, int32_t* chosen);

}  // namespace moesaic::kernels
