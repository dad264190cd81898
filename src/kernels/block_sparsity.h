// Attention that reads only those blocks of a sequence in which its softmax has its mass, by digests of their
// keys. Nothing is evicted: each row chooses anew from all blocks. docs/contracts/sparsity.md is the law.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "kernels/attention.h"
#include "kernels/kept_choices.h"

namespace moesaic::kernels {

/// Blocks that are always read: the first, where attention sinks are, the one before the current, and the
/// current one, which has no digest.
inline constexpr int kKeptBlocks = 3;
inline constexpr int kMinSparseBlocks = kKeptBlocks + 1;  ///< budgets have at least one to choose

/// Shares of softmax mass by how often they were met: at most 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 1.
struct MassHistogram {
  static constexpr std::array<double, 8> kBounds = {1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 1};
  std::array<int64_t, kBounds.size()> counts = {};
  double sum = 0;
  void Add(double share);
  int64_t count() const;
  double Quantile(double part) const;  ///< the bound of the bucket that holds it; 0 without any
};

/// What SparseAttention did, of (row, KV head) pairs unless said otherwise. Rises for ever.
struct SparsityCounters {
  int64_t selections = 0;                   // pairs that chose, or took over what an earlier row chose
  int64_t reused = 0;                       // of these: took over
  int64_t rechosen = 0;                     // of these: what they were to take over was not known any more
  int64_t capped = 0;                       // of these: the budget ended before the estimated mass was there
  int64_t blocks_read = 0, blocks_all = 0;  // by them; and that dense attention would have read
  int64_t dense_fallbacks = 0;              // pairs that read all blocks after all, for their bound
  MassHistogram bound;                      // of query heads whose bound was computed: mass left out, at most
  MassHistogram missed;                     // of audited query heads: mass that the choice left out, in fact
};

/// How rows of a sequence choose. One for all layers of a step.
struct BlockSparsity {
  int budget_blocks = 0;   // that a row reads at most, kKeptBlocks among them
  int first_position = 0;  // rows before read all blocks
  /// Below 1, a row takes the best blocks only until they have this share of the estimated mass of all full
  /// blocks, in the mean over the KV head's query heads; a row of more than kMinSparseBlocks may then leave
  /// some out. At 1 it takes the whole budget, and all blocks where they are no more.
  float mass = 1;
  /// So many rows in a row, from each multiple of it inside a block of the sequence on, read what the first
  /// of them chose; in [1, kKvBlockTokens].
  int reuse = 1;
  KeptChoices* kept = nullptr;  // the sequence's, where reuse is above 1; written by the calling thread
  /// A KV head of a row reads all blocks when for one of its query heads more than this share of the softmax
  /// mass may have been left out; 1: never, and bounds aren't computed.
  float eps = 1;
  /// Each so many-th choice of `counters`, at most one KV head of a row, is held against dense attention,
  /// which changes no result; 0: none.
  int audit_every = 0;
  SparsityCounters* counters = nullptr;  // or null; written by the calling thread

  /// The first position whose row may leave a block out.
  int first_sparse() const {
    const int filled = (mass < 1 ? kMinSparseBlocks : budget_blocks) * kKvBlockTokens;
    return first_position > filled ? first_position : filled;
  }
  /// The position of the row whose choice the row at `position` reads; its own where it chooses itself.
  int ChooserOf(int position) const {
    const int slot = position % kKvBlockTokens;
    const int first = position - slot % reuse;
    return first > first_sparse() ? first : first_sparse();
  }
  /// The end of the group of `position`.
  int GroupEnd(int position) const {
    const int slot = position % kKvBlockTokens;
    const int end = slot - slot % reuse + reuse;
    return position - slot + (end < kKvBlockTokens ? end : kKvBlockTokens);
  }
};

/// Whether row `row` of `slice` chooses blocks in this layer.
inline bool ChoosesBlocks(const SequenceSlice& slice, const KvLayer& cache, int row) {
  return slice.sparsity != nullptr && cache.digests != nullptr &&
         slice.start + row >= slice.sparsity->first_sparse();
}

/// Cuts slices where rows begin to choose: each then has `sparsity` for all of its rows or for none. Memory
/// comes from ctx.scratch, where any may choose.
std::span<const SequenceSlice> CutAtFirstChoice(const ExecContext& ctx, const KvLayer& cache,
                                                std::span<const SequenceSlice> sequences);

/// Builds the digests of all blocks that the slices' tokens fill; KvWrite comes first. Does nothing where the
/// layer has none.
struct BuildDigestsParams {
  KvLayer cache;
  std::span<const SequenceSlice> sequences;
};
void BuildDigests(const ExecContext& ctx, const BuildDigestsParams& params);

class RestOfRows;
struct SparseRow;
struct SparseRows;

/// Attention in which rows of slices with `sparsity` choose their blocks. A row's choice depends on its own
/// query heads of a KV head, its position and the digests alone: it is the same in any batch, chunk or draft.
/// Rows that read all blocks get the very bits of Attention.
///
/// The pass stops before each read of blocks, so that its caller can fetch those that are not in memory:
///
///   SparseAttentionPass pass(ctx, params);
///   while (pass.ChooseBlocks()) {
///     do {
///       Fetch(pass.reads());
///     } while (pass.AttendChosen());
///   }
class SparseAttentionPass {
 public:
  /// `ctx` and all that `params` point to are borrowed; params.lse must be null.
  SparseAttentionPass(const ExecContext& ctx, const AttentionParams& params);
  ~SparseAttentionPass();
  SparseAttentionPass(const SparseAttentionPass&) = delete;
  SparseAttentionPass& operator=(const SparseAttentionPass&) = delete;

  /// Chooses the blocks of the next rows. False: all rows have been computed.
  bool ChooseBlocks();
  /// The slices whose blocks AttendChosen reads next.
  std::span<const SequenceSlice> reads() const { return reads_; }
  /// Attends over the blocks of reads(). True: some rows need more blocks, those of reads() now, and
  /// AttendChosen must be called again.
  bool AttendChosen();

 private:
  void ListReads(std::span<const SequenceSlice> dense);

  const ExecContext& ctx_;
  const AttentionParams params_;
  const size_t mark_;                     // of the scratch memory, before the pass
  size_t group_mark_;                     // before the group
  std::span<const SequenceSlice> dense_;  // that read all blocks, until they have been listed
  std::span<SparseRow> rows_;             // that choose; in groups, whose scores fit the caches
  size_t at_once_ = 0, next_row_ = 0;
  bool started_ = false;
  std::unique_ptr<SparseRows> group_;
  bool bounds_ = false;   // some row of the group needs a bound
  int64_t last_row_ = 0;  // of the batch, in reads()
  std::span<const SequenceSlice> reads_;
  std::unique_ptr<RestOfRows> rest_;
};

/// A whole pass, for callers whose blocks are all in memory.
void SparseAttention(const ExecContext& ctx, const AttentionParams& params);

struct BlockChoice {
  int count;      // of blocks
  bool captured;  // they have the mass that was asked for; true where all are read
};
/// The blocks that a row at `position` reads, in order: kKeptBlocks and those of the greatest importance
/// [position / 64], up to `budget` in all; equals go to the later block, NaN is greater than any number. With
/// `mass` below 1, only until those taken, the kept ones among them, have that share of the sum of
/// importance; what is NaN is taken and not counted. `chosen` has room for `budget`; kMinSparseBlocks <=
/// budget <= position / 64 + 1.
BlockChoice ChooseBlocks(const float* importance, int position, int budget, float mass, int32_t* chosen);

}  // namespace moesaic::kernels
