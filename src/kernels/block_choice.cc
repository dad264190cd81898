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

// Importance as whole numbers, which compare without a branch: NaN is above all.
int32_t Order(float importance) {
  const auto bits = std::bit_cast<int32_t>(importance + 0.0F);  // -0 becomes 0
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  return std::isnan(importance) ? kMax : bits < 0 ? bits ^ kMax : bits;
}

// The `wanted`-th largest of `order`, found bit by bit: passes over all of them that compilers make vectors
// of.
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
  MOESAIC_CHECK_LE(kMinSparseBlocks, budget);
  MOESAIC_CHECK_LE(budget, current + 1);
  const int free = budget - kKeptBlocks, candidates = current - 2;  // these are [1, current - 1)
  constexpr int kFew = 1024;                                        // blocks, 64k tokens
  int32_t few[kFew];
  std::vector<int32_t> many(candidates > kFew ? candidates : 0);
  const std::span<int32_t> order(candidates > kFew ? many.data() : few, static_cast<size_t>(candidates));
  for (int i = 0; i < candidates; ++i) order[i] = Order(importance[i + 1]);
  // All that are above the threshold, and of its equals the last.
  const int32_t least = free < candidates ? Threshold(order, free) : std::numeric_limits<int32_t>::min();
  int equals = free - static_cast<int>(std::ranges::count_if(order, [=](int32_t o) { return o > least; }));
  int left = free;
  for (int i = candidates - 1; left > 0; --i) {
    if (order[i] > least || (order[i] == least && equals-- > 0)) chosen[left--] = i + 1;
  }
  BlockChoice taken = {.count = free, .captured = true};
  if (mass < 1) {
    const auto before = [order](int32_t a, int32_t b) {
      return order[a - 1] != order[b - 1] ? order[a - 1] > order[b - 1] : a > b;
    };
    std::sort(chosen + 1, chosen + 1 + free, before);
    taken = TakeMass(importance, current, mass, {chosen + 1, static_cast<size_t>(free)});
    // The first that was cut off says whether blocks that must be read were.
    if (taken.count == free) {
      const auto wrong = std::ranges::count(order, Order(std::numeric_limits<float>::quiet_NaN()));
      taken.captured = free == candidates || (taken.captured && wrong <= free);
    }
    std::sort(chosen + 1, chosen + 1 + taken.count);
  }
  chosen[0] = 0;
  taken.count += kKeptBlocks;
  chosen[taken.count - 2] = current - 1;
  chosen[taken.count - 1] = current;
  return taken;
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
    if (s.sparsity != nullptr && cache.digests != nullptr) {
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
  for (SequenceSlice& s : cut.first(count)) {
    if (s.sparsity != nullptr && !ChoosesBlocks(s, cache, 0)) s.sparsity = nullptr;
  }
  return cut.first(count);
}

}  // namespace moesaic::kernels
