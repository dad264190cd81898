#include <algorithm>
#include <cmath>
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

void ChooseBlocks(const float* importance, int position, int budget, int32_t* chosen) {
  const int current = position / kKvBlockTokens;
  MOESAIC_CHECK_LE(kLeastSparseBlocks, budget);
  MOESAIC_CHECK_LE(budget, current);
  // Candidates are [1, current - 1). The best stand in front after the cut.
  const int free = budget - kKeptBlocks, candidates = current - 2;
  const auto better = [importance](int32_t a, int32_t b) {
    const float x = importance[a], y = importance[b];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
    return x == y || std::isnan(x) ? a > b : x > y;
  };
  constexpr int kFew = 1024;  // blocks, 64k tokens
  int32_t few[kFew];
  std::vector<int32_t> many(candidates > kFew ? candidates : 0);
  int32_t* order = candidates > kFew ? many.data() : few;
  std::iota(order, order + candidates, 1);
  if (free < candidates) std::nth_element(order, order + free, order + candidates, better);
  chosen[0] = 0;
  std::copy_n(order, free, chosen + 1);
  std::sort(chosen + 1, chosen + 1 + free);
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
    int dense = s.count;  // rows before the first that chooses
    if (s.sparsity != nullptr && cache.digest_offset != 0) {
      dense = std::clamp(s.sparsity->first_sparse() - s.start, 0, s.count);
    }
    if (dense > 0) {
      cut[count] = s;
      cut[count].count = dense;
      if (s.sparsity != nullptr && s.sparsity->cold != nullptr)
        s.sparsity->cold->Need(cache, cut.subspan(count, 1));
      cut[count++].sparsity = nullptr;
    }
    if (dense == s.count) continue;
    cut[count] = s;
    cut[count].start += dense;
    cut[count].row += dense;
    cut[count++].count -= dense;
  }
  return cut.first(count);
}

}  // namespace moesaic::kernels
