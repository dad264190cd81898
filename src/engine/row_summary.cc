#include "engine/row_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::engine {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

double SumOfExp(std::span<const float> logits, float greatest, float inverse) {
  if (!std::isfinite(greatest)) return 0;
  double sum = 0;
  for (const float logit : logits) sum += std::exp((logit - greatest) * inverse);
  return sum;
}

// Appends the first `count` logits in the order of candidates.
void AppendBest(std::span<const float> logits, int first, int count, std::vector<TokenLogit>* best) {
  const auto begin = std::ssize(*best);
  const auto heap = [&] { return best->begin() + begin; };  // the last of the candidates is on top
  for (size_t i = 0; i < logits.size(); ++i) {
    const TokenLogit entry = {first + static_cast<int32_t>(i), logits[i]};
    if (std::ssize(*best) - begin == count) {
      if (!(entry.logit > heap()->logit)) continue;  // ties: the entry's id is greater
      std::pop_heap(heap(), best->end(), ComesBefore);
      best->back() = entry;
    } else {
      best->push_back(entry);
    }
    std::push_heap(heap(), best->end(), ComesBefore);
  }
  std::sort_heap(heap(), best->end(), ComesBefore);
}

}  // namespace

bool RowSummary::has_nan() const {
  return std::ranges::any_of(slices, [](const SliceSums& slice) { return std::isnan(slice.greatest); });
}

float RowSummary::greatest() const {
  float greatest = kLowest;
  for (const SliceSums& slice : slices) greatest = std::max(greatest, slice.greatest);
  return greatest;
}

double RowSummary::LogNormalizer() const {
  const float top = greatest();
  double sum = 0;
  for (const SliceSums& slice : slices) {
    if (slice.exp_sum > 0) sum += slice.exp_sum * std::exp(double{slice.greatest} - top);
  }
  return sum > 0 ? top + std::log(sum) : std::numeric_limits<double>::quiet_NaN();
}

double RowSummary::WeightSum(float temperature) const {
  const float top = greatest();
  double sum = 0;
  for (const SliceSums& slice : slices) {
    if (slice.weight_sum > 0)
      sum += slice.weight_sum * std::exp((double{slice.greatest} - top) / temperature);
  }
  return sum;
}

SliceSums SummarizeSlice(std::span<const float> logits, int first, int count, const RowNeeds& needs,
                         std::vector<TokenLogit>* best) {
  SliceSums sums{.greatest = kLowest};
  bool has_nan = false;
  for (const float logit : logits) {
    sums.greatest = std::max(sums.greatest, logit);  // ignores NaN
    has_nan |= std::isnan(logit);
  }
  if (has_nan) {  // nothing is drawn from the row; candidates of NaNs have no order
    sums.greatest = std::numeric_limits<float>::quiet_NaN();
    return sums;
  }
  AppendBest(logits, first, count, best);
  if (needs.normalizer) sums.exp_sum = SumOfExp(logits, sums.greatest, 1);
  if (needs.temperature > 0) {
    sums.weight_sum = needs.normalizer && needs.temperature == 1
                          ? sums.exp_sum
                          : SumOfExp(logits, sums.greatest, 1.0F / needs.temperature);
  }
  return sums;
}

RowSummary MergeSlices(std::vector<TokenLogit> best, std::span<const int> counts,
                       std::span<const parallel::Range> columns, std::vector<SliceSums> slices) {
  MOESAIC_CHECK_EQ(counts.size(), columns.size());
  RowSummary row{.slices = std::move(slices)};
  // The first of the last candidates of slices with other tokens: later ones may come after those.
  TokenLogit end = {std::numeric_limits<int32_t>::max(), kLowest};
  size_t next = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    row.vocab_size += columns[i].count;
    next += counts[i];
    if (counts[i] < columns[i].count && counts[i] > 0 && ComesBefore(best[next - 1], end)) {
      end = best[next - 1];
    }
  }
  std::sort(best.begin(), best.end(), ComesBefore);
  const auto after = std::find_if(best.begin(), best.end(),
                                  [&](const TokenLogit& entry) { return ComesBefore(end, entry); });
  best.erase(after, best.end());
  row.best = std::move(best);
  return row;
}

int32_t LikeliestToken(const RowSummary& row) {
  return row.has_nan() || row.best.empty() ? -1 : row.best.front().token;
}

}  // namespace moesaic::engine
