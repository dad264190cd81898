#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "kernels/block_sparsity.h"

namespace moesaic::kernels {

void MassHistogram::Add(double share) {
  const auto* const bucket = std::lower_bound(kBounds.begin(), kBounds.end() - 1, share);
  ++counts[bucket - kBounds.begin()];
  sum += share;
}

int64_t MassHistogram::count() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

double MassHistogram::Quantile(double part) const {
  int64_t below = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    below += counts[i];
    if (below > 0 && static_cast<double>(below) >= part * static_cast<double>(count())) return kBounds[i];
  }
  return 0;
}

namespace {

// Blocks by importance, then by place, as whole numbers, which compare without a branch: NaN is above all.
uint64_t Rank(float importance, int32_t block) {
  const auto bits = std::bit_cast<uint32_t>(importance + 0.0F);  // -0 becomes 0
  const uint32_t order = std::isnan(importance)      ? std::numeric_limits<uint32_t>::max()
                         : (bits & 0x80000000U) != 0 ? ~bits
                                                     : bits | 0x80000000U;
  return uint64_t{order} << 32U | static_cast<uint32_t>(block);
}
int32_t BlockOf(uint64_t rank) { return static_cast<int32_t>(rank & 0xffffffffU); }

// How many of `order` [free], the best first, are taken until they and the kept blocks have `mass` of the
// sum.
BlockChoice TakeMass(const float* importance, int current, float mass, std::span<const int32_t> order) {
  double all = 0;
  for (int i = 0; i < current; ++i) all += std::isnan(importance[i]) ? 0 : importance[i];
  const auto add = [importance](double sum, int32_t block) {
    return std::isnan(importance[block]) ? sum : sum + importance[block];
  };
  double have = add(add(0, 0), current - 1);
  int taken = 0;
  const auto wanted = [&](int32_t block) { return have < mass * all || std::isnan(importance[block]); };
  for (; taken < std::ssize(order) && wanted(order[taken]); ++taken) have = add(have, order[taken]);
  return {.count = taken, .captured = have >= mass * all};
}

}  // namespace

BlockChoice ChooseBlocks(const float* importance, int position, int budget, float mass, int32_t* chosen) {
  const int current = position / kKvBlockTokens;
  MOESAIC_CHECK_LE(kLeastSparseBlocks, budget);
  MOESAIC_CHECK_LE(budget, current + 1);
  // Candidates are [1, current - 1). The best stand in front after the cut.
  const int free = budget - kKeptBlocks, candidates = current - 2;
  constexpr int kFew = 1024;  // blocks, 64k tokens
  uint64_t few[kFew];
  std::vector<uint64_t> many(candidates > kFew ? candidates : 0);
  uint64_t* ranks = candidates > kFew ? many.data() : few;
  for (int i = 0; i < candidates; ++i) ranks[i] = Rank(importance[i + 1], i + 1);
  if (free < candidates) std::nth_element(ranks, ranks + free, ranks + candidates, std::greater<>());
  BlockChoice taken = {.count = free, .captured = true};
  if (mass < 1) {
    std::sort(ranks, ranks + free, std::greater<>());
    for (int i = 0; i < free; ++i) chosen[i + 1] = BlockOf(ranks[i]);
    taken = TakeMass(importance, current, mass, {chosen + 1, static_cast<size_t>(free)});
    // The first that was cut off says whether blocks that must be read were.
    if (taken.count == free) {
      taken.captured =
          free == candidates || (taken.captured && !std::isnan(importance[BlockOf(ranks[free])]));
    }
  }
  chosen[0] = 0;
  for (int i = 0; i < taken.count; ++i) chosen[i + 1] = BlockOf(ranks[i]);
  std::sort(chosen + 1, chosen + 1 + taken.count);
  taken.count += kKeptBlocks;
  chosen[taken.count - 2] = current - 1;
  chosen[taken.count - 1] = current;
  return taken;
}

void NeedDense(const ExecContext& ctx, const KvLayer& cache, std::span<const SequenceSlice> slices) {
  const size_t mark = ctx.scratch->Mark();
  const std::span<SequenceSlice> dense = ctx.scratch->Take<SequenceSlice>(slices.size());
  ColdSource* cold = nullptr;
  size_t count = 0;
  for (const SequenceSlice& s : slices) {
    if (s.sparsity == nullptr || s.sparsity->cold == nullptr || ChoosesBlocks(s, cache, 0)) continue;
    cold = s.sparsity->cold;
    dense[count++] = s;
  }
  if (count > 0) cold->Need(cache, dense.first(count));
  ctx.scratch->Rewind(mark);
}

std::span<const SequenceSlice> CutAtFirstChoice(const ExecContext& ctx, const KvLayer& cache,
                                                std::span<const SequenceSlice> sequences) {
  const bool any = std::any_of(sequences.begin(), sequences.end(),
                               [](const SequenceSlice& s) { return s.sparsity != nullptr; });
  if (!any) return sequences;
  const std::span<SequenceSlice> cut = ctx.scratch->Take<SequenceSlice>(2 * sequences.size());
  size_t count = 0;
  for (const SequenceSlice& s : sequences) {
    int dense = s.count;  // rows before the first that chooses
    if (s.sparsity != nullptr && cache.digest_offset != 0) {
      dense = std::clamp(s.sparsity->first_sparse() - s.start, 0, s.count);
    }
    if (dense > 0) {
      cut[count] = s;
      cut[count++].count = dense;
    }
    if (dense == s.count) continue;
    cut[count] = s;
    cut[count].start += dense;
    cut[count].row += dense;
    cut[count++].count -= dense;
  }
  NeedDense(ctx, cache, cut.first(count));
  for (SequenceSlice& s : cut.first(count)) {
    if (s.sparsity != nullptr && !ChoosesBlocks(s, cache, 0)) s.sparsity = nullptr;
  }
  return cut.first(count);
}

}  // namespace moesaic::kernels
