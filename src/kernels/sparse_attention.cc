// Block-sparse attention: chooses blocks (sparse_choice.cc), attends over the shorter block tables, and
// audits some choices (sparse_audit.cc). Callers fetch the chosen blocks before attention reads them.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/round.h"
#include "kernels/sparse_rows.h"

namespace moesaic::kernels {

SparseRows::SparseRows(const ExecContext& ctx, const AttentionParams& params, std::span<SparseRow> rows)
    : ctx(ctx), p(params), rows(rows), group(params.heads / params.cache.heads) {
  for (const SparseRow& row : rows) {
    stride = std::max(stride, base::RoundUp(row.blocks(), kScoredBlocks));
    budget = std::max(budget, row.budget());
  }
  chosen = Take<int32_t>(pairs() * budget);
  tables = Take<int32_t>(pairs() * budget);
}

void SparseRows::FindKeySummaries(const SparseRow& row, int kv_head, int first, int count,
                                  const std::byte** summaries) const {
  for (int b = 0; b < count; ++b) {
    summaries[b] = p.cache.key_summaries + row.slice->block_table[first + b] * p.cache.key_summary_stride +
                   kv_head * KeySummaryBytes(p.cache);
  }
}

SequenceSlice SparseRows::SliceOf(const SparseRow& row, int kv_head, const int32_t* table, int blocks) const {
  return {.block_table = table,
          .start = (blocks - 1) * kKvBlockTokens + row.position % kKvBlockTokens,
          .count = 1,
          .row = static_cast<int>(row.batch_row),
          .kv_head = kv_head};
}

namespace {

// Maximum floats of the scores of a group of rows, about a share of a last-level cache. At a context of
// 16,384 it holds 240 rows of 64 heads if a KV head has 16 or more query heads. Smaller groups of heads are
// padded to 16: it holds 30 rows of 32 heads with keys of their own.
constexpr int64_t kScoreFloats = 4 << 20;

// Selects the KV head of row `r` that is audited, if any, and counts the row's selections.
void CountSelections(const SparseRows& s, int64_t r) {
  SparseRow& row = s.rows[r];
  const SparsitySettings& settings = row.settings();
  if (row.sparsity().counters == nullptr) return;
  const int heads = s.p.cache.heads;
  SparsityCounters& counters = *row.sparsity().counters;
  if (settings.audit_every > 0) {
    const int64_t every = settings.audit_every;
    const int64_t due = base::RoundUp(counters.selections, every);
    if (due < counters.selections + heads) row.audited = static_cast<int>(due - counters.selections);
  }
  counters.selections += heads;
  if (!s.Chooses(r)) {
    counters.reused += heads;
  } else if (settings.ChooserOf(row.position) != row.position) {
    counters.rechosen += heads;
  }
  counters.blocks_read += int64_t{heads} * row.budget();
  counters.blocks_all += int64_t{heads} * (row.blocks() + 1);
}

// Returns the number of rows of a group, so that their scores fit kScoreFloats.
size_t RowsPerGroup(const AttentionParams& params, int max_blocks) {
  return static_cast<size_t>(std::max<int64_t>(kScoreFloats / ChoiceFloats(params, max_blocks), 1));
}

}  // namespace

SparseAttentionPass::SparseAttentionPass(const ExecContext& ctx, const AttentionParams& params)
    : ctx_(ctx), params_(params), mark_(ctx.scratch->Mark()), group_mark_(mark_) {
  MOESAIC_CHECK(params.lse == nullptr);
  const KvLayer& cache = params.cache;
  const bool any = std::ranges::any_of(params.sequences, [&](const SequenceSlice& s) {
    return s.count > 0 && ChoosesBlocks(s, cache, s.count - 1);
  });
  if (!any) {
    dense_ = params.sequences;
    return;
  }
  const std::span<const SequenceSlice> cut = CutAtFirstChoice(ctx, cache, params.sequences);
  const std::span<SequenceSlice> dense = ctx.scratch->Take<SequenceSlice>(cut.size());
  size_t dense_count = 0, count = 0;
  for (const SequenceSlice& s : cut) count += s.sparsity == nullptr ? 0 : s.count;
  rows_ = ctx.scratch->Take<SparseRow>(count);
  count = 0;
  int max_blocks = 1;
  for (const SequenceSlice& s : cut) {
    if (s.sparsity == nullptr) {
      dense[dense_count++] = s;
      continue;
    }
    MOESAIC_CHECK_LE(kMinSparseBlocks, s.sparsity->settings.budget_blocks);
    for (int i = 0; i < s.count; ++i) rows_[count++] = {&s, s.start + i, s.row + i};
    max_blocks = std::max(max_blocks, (s.start + s.count) / kKvBlockTokens);
  }
  dense_ = dense.first(dense_count);
  rows_per_group_ = RowsPerGroup(params, max_blocks);
  group_mark_ = ctx.scratch->Mark();
}

SparseAttentionPass::~SparseAttentionPass() { ctx_.scratch->Rewind(mark_); }

bool SparseAttentionPass::ChooseBlocks() {
  ctx_.scratch->Rewind(group_mark_);
  if (rows_.empty()) {
    reads_ = std::exchange(dense_, {});
    return !std::exchange(started_, true);
  }
  if (next_row_ == rows_.size()) return false;
  const size_t count = std::min(rows_per_group_, rows_.size() - next_row_);
  group_ = std::make_unique<SparseRows>(ctx_, params_, rows_.subspan(next_row_, count));
  next_row_ += count;
  ChooseForRows(group_.get());
  ListReads(std::exchange(dense_, {}));
  return true;
}

// Lists the `dense` slices, then a slice of each row and KV head over its chosen blocks, then audited heads.
void SparseAttentionPass::ListReads(std::span<const SequenceSlice> dense) {
  const SparseRows& s = *group_;
  const size_t pairs = s.rows.size() * s.p.cache.heads;
  const std::span<SequenceSlice> slices =
      ctx_.scratch->Take<SequenceSlice>(dense.size() + pairs + s.rows.size());
  std::ranges::copy(dense, slices.begin());
  size_t used = dense.size();
  last_row_ = 0;
  for (int64_t r = 0; r < std::ssize(s.rows); ++r) {
    CountSelections(s, r);
    const SparseRow& row = s.rows[r];
    last_row_ = std::max(last_row_, row.batch_row);
    for (int h = 0; h < s.p.cache.heads; ++h) {
      slices[used++] = s.SliceOf(row, h, s.tables + s.Pair(row.choice, h) * s.budget, row.budget());
    }
  }
  for (const SequenceSlice& slice : dense) {
    last_row_ = std::max<int64_t>(last_row_, slice.row + slice.count - 1);
  }
  audited_ = 0;
  for (const SparseRow& row : s.rows) {
    if (row.audited >= 0) slices[used + audited_++] = s.AuditOf(row);
  }
  reads_ = slices.first(used + audited_);
}

void SparseAttentionPass::AttendChosen() {
  AttentionParams params = params_;
  params.sequences = reads_.first(reads_.size() - audited_);
  if (audited_ > 0) params.lse = ctx_.scratch->Take<float>((last_row_ + 1) * params.heads).data();
  Attention(ctx_, params);
  if (audited_ > 0) AuditRows(*group_, params.lse);
}

void SparseAttention(const ExecContext& ctx, const AttentionParams& params) {
  SparseAttentionPass pass(ctx, params);
  while (pass.ChooseBlocks()) pass.AttendChosen();
}

}  // namespace moesaic::kernels
