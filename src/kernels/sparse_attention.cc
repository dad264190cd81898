// Attention over chosen blocks: the choice (sparse_choice.cc), ordinary attention over shorter block tables,
// and, where it is wanted, a bound of what was left out (sparse_certificate.cc).
#include <algorithm>

#include "base/check.h"
#include "base/round.h"
#include "kernels/sparse_rows.h"

namespace moesaic::kernels {

SparseRows::SparseRows(const ExecContext& ctx, const AttentionParams& params, std::span<SparseRow> rows)
    : ctx(ctx), p(params), rows(rows), group(params.heads / params.cache.heads) {
  for (const SparseRow& row : rows) {
    stride = std::max(stride, base::RoundUp(row.blocks(), kScoredBlocks));
    budget = std::max(budget, row.most());
    if (row.sparsity().cold != nullptr) cold = row.sparsity().cold;
  }
  chosen = Take<int32_t>(pairs() * budget);
  tables = Take<int32_t>(pairs() * budget);
  choices = Take<BlockChoice>(pairs());
}

void SparseRows::FindDigests(const SparseRow& row, int kv_head, int first, int count,
                             const std::byte** digests) const {
  for (int b = 0; b < count; ++b) {
    digests[b] = p.cache.digests + row.slice->block_table[first + b] * p.cache.digest_stride +
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

void SparseRows::AttendOver(const AttentionParams& params, std::span<const SequenceSlice> slices) const {
  if (cold != nullptr) cold->Need(p.cache, slices);
  Attention(ctx, params);
}

namespace {

// Scores of rows that are worked on at once take at most this, about a share of a last-level cache: at a
// context of 16,384, 240 rows of 64 heads whose KV heads have 16 each or more. Fewer are padded to 16: 30
// rows of 32 heads with keys of their own.
constexpr int64_t kScoreFloats = 4 << 20;

// Whether one of the row's KV heads is audited, and which; counts what it chose.
void ChooseAudit(const SparseRows& s, int64_t r) {
  SparseRow& row = s.rows[r];
  const BlockSparsity& sparsity = *row.slice->sparsity;
  if (sparsity.counters == nullptr) return;
  const int heads = s.p.cache.heads;
  SparsityCounters& counters = *sparsity.counters;
  if (sparsity.audit_every > 0) {
    const int64_t every = sparsity.audit_every;
    const int64_t due = base::RoundUp(counters.selections, every);
    if (due < counters.selections + heads) row.audited = static_cast<int>(due - counters.selections);
  }
  counters.selections += heads;
  if (!s.Chooses(r)) {
    counters.reused += heads;
  } else if (sparsity.ChooserOf(row.position) != row.position) {
    counters.rechosen += heads;
  }
  for (int h = 0; h < heads; ++h) {
    const BlockChoice& choice = s.choices[s.Pair(row.choice, h)];
    counters.blocks_read += choice.count;
    counters.capped += choice.captured ? 0 : 1;
  }
  counters.blocks_all += int64_t{heads} * (row.blocks() + 1);
}

// Attends over what was chosen; `dense` slices come along.
void Attend(const SparseRows& s, std::span<const SequenceSlice> dense) {
  const size_t pairs = s.rows.size() * s.p.cache.heads;
  const std::span<SequenceSlice> slices = s.ctx.scratch->Take<SequenceSlice>(dense.size() + pairs);
  std::copy(dense.begin(), dense.end(), slices.begin());
  size_t used = dense.size();
  bool bounds = false;
  int64_t last_row = 0;
  for (int64_t r = 0; r < std::ssize(s.rows); ++r) {
    const BlockSparsity& sparsity = *s.rows[r].slice->sparsity;
    ChooseAudit(s, r);
    bounds |= sparsity.eps < 1 || s.rows[r].audited >= 0;
    last_row = std::max(last_row, s.rows[r].batch_row);
    for (int h = 0; h < s.p.cache.heads; ++h) {
      const int64_t pair = s.Pair(s.rows[r].choice, h);
      slices[used++] = s.SliceOf(s.rows[r], h, s.tables + pair * s.budget, s.choices[pair].count);
    }
  }
  for (const SequenceSlice& slice : dense) {
    last_row = std::max<int64_t>(last_row, slice.row + slice.count - 1);
  }
  AttentionParams params = s.p;
  params.sequences = slices;
  if (bounds) params.lse = s.Take<float>((last_row + 1) * s.p.heads);
  s.AttendOver(params, slices.subspan(dense.size()));
  if (bounds) BoundError(s, params.lse);
}

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
  const std::span<SparseRow> rows = ctx.scratch->Take<SparseRow>(count);
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
      static_cast<size_t>(std::max<int64_t>(kScoreFloats / ChoiceFloats(params, most_blocks), 1));
  for (size_t first = 0; first < rows.size(); first += at_once) {
    const size_t inner = ctx.scratch->Mark();
    SparseRows some(ctx, params, rows.subspan(first, std::min(at_once, rows.size() - first)));
    ChooseForRows(&some);
    Attend(some, along);
    along = {};
    ctx.scratch->Rewind(inner);
  }
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
