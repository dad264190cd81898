#include <algorithm>
#include <bit>
#include <cmath>
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

// Maps importance to an integer of the same order, which compares without a branch. NaN is the largest.
int32_t Order(float importance) {
  const auto bits = std::bit_cast<int32_t>(importance + 0.0F);  // -0 becomes 0
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  return std::isnan(importance) ? kMax : bits < 0 ? bits ^ kMax : bits;
}

// Returns the `wanted`-th largest of `order`. It is found bit by bit, in passes that compilers vectorize.
int32_t Threshold(std::span<const int32_t> order, int wanted) {
  const auto at_least = [order](int32_t least) {
    int count = 0;
    for (const int32_t each : order) count += each >= least ? 1 : 0;
    return count;
  };
  int32_t found = at_least(0) >= wanted ? 0 : std::numeric_limits<int32_t>::min();
  for (int bit = 30; bit >= 0; --bit) {
    const int32_t more = found | int32_t{1} << bit;
    const int count = at_least(more);
    if (count < wanted) continue;
    found = more;
    if (count == wanted) break;
  }
  return found;
}

}  // namespace

void ChooseBlocks(const float* importance, int position, int budget, int32_t* chosen) {
  const int current = position / kKvBlockTokens;
  MOESAIC_CHECK_LE(kMinSparseBlocks, budget);
  MOESAIC_CHECK_LE(budget, current + 1);
  const int free = budget - kKeptBlocks, candidates = current - 2;  // blocks [1, current - 1)
  constexpr int kFew = 1024;                                        // blocks; 64k tokens
  int32_t few[kFew];
  std::vector<int32_t> many(candidates > kFew ? candidates : 0);
  const std::span<int32_t> order(candidates > kFew ? many.data() : few, static_cast<size_t>(candidates));
  for (int i = 0; i < candidates; ++i) order[i] = Order(importance[i + 1]);
  // Takes all blocks above the threshold, and the last ones of those that equal it.
  const int32_t least = free < candidates ? Threshold(order, free) : std::numeric_limits<int32_t>::min();
  int equals = free - static_cast<int>(std::ranges::count_if(order, [=](int32_t o) { return o > least; }));
  int left = free;
  for (int i = candidates - 1; left > 0; --i) {
    if (order[i] > least || (order[i] == least && equals-- > 0)) chosen[left--] = i + 1;
  }
  chosen[0] = 0;
  chosen[budget - 2] = current - 1;
  chosen[budget - 1] = current;
}

std::span<const SequenceSlice> CutAtFirstChoice(const ExecContext& ctx, const KvLayer& cache,
                                                std::span<const SequenceSlice> sequences) {
  const bool any = std::any_of(sequences.begin(), sequences.end(),
                               [](const SequenceSlice& s) { return s.sparsity != nullptr; });
  if (!any) return sequences;
  const std::span<SequenceSlice> cut = ctx.scratch->Take<SequenceSlice>(2 * sequences.size());
  size_t count = 0;
  for (const SequenceSlice& s : sequences) {
    int dense = s.count;  // rows before the first one that chooses
    if (s.sparsity != nullptr && cache.key_summaries != nullptr) {
      dense = std::clamp(s.sparsity->settings.first_sparse() - s.start, 0, s.count);
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
  for (SequenceSlice& s : cut.first(count)) {
    if (s.sparsity != nullptr && !ChoosesBlocks(s, cache, 0)) s.sparsity = nullptr;
  }
  return cut.first(count);
}

}  // namespace moesaic::kernels
