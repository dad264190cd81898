#include "carve/slice_assignment.h"

#include <algorithm>

namespace moesaic::carve {
namespace {

constexpr int kPasses = 3;  // passes over all pairs of slices; further ones change almost nothing

// Exchanges neurons between two slices, best pairs first, as long as this lowers the cost.
bool Exchange(const RowMatrix& cost, int a, int b, std::vector<int>* in_a, std::vector<int>* in_b) {
  const auto sort_by_gain = [&](int from, int to, std::vector<int>* neurons) {
    std::stable_sort(neurons->begin(), neurons->end(),
                     [&](int i, int j) { return cost(from, i) - cost(to, i) > cost(from, j) - cost(to, j); });
  };
  sort_by_gain(a, b, in_a);
  sort_by_gain(b, a, in_b);
  size_t i = 0;
  for (; i < std::min(in_a->size(), in_b->size()); ++i) {
    const int p = (*in_a)[i], q = (*in_b)[i];
    if (cost(a, p) - cost(b, p) + cost(b, q) - cost(a, q) <= 1e-6F * (cost(a, p) + cost(b, q))) break;
    std::swap((*in_a)[i], (*in_b)[i]);
  }
  return i > 0;
}

}  // namespace

std::vector<int> ImproveSlices(const RowMatrix& energy, std::span<const float> importance,
                               const std::vector<std::vector<int>>& off, int routed,
                               const std::vector<int>& expert_of) {
  const auto neurons = static_cast<int>(energy.cols());
  RowMatrix cost = RowMatrix::Zero(routed + 1, neurons);  // the last row belongs to the shared expert
  for (int64_t t = 0; t < energy.rows(); ++t) {
    for (const int e : off[t]) cost.row(e) += importance[t] * energy.row(t);
  }
  std::vector<std::vector<int>> slices(static_cast<size_t>(routed) + 1);
  for (int j = 0; j < neurons; ++j) slices[expert_of[j] < 0 ? routed : expert_of[j]].push_back(j);
  bool changed = true;
  for (int pass = 0; pass < kPasses && changed; ++pass) {
    changed = false;
    for (int a = 0; a < routed; ++a) {
      for (int b = a + 1; b <= routed; ++b) changed |= Exchange(cost, a, b, &slices[a], &slices[b]);
    }
  }
  std::vector<int> improved(static_cast<size_t>(neurons), -1);
  for (int e = 0; e < routed; ++e) {
    for (const int j : slices[e]) improved[j] = e;
  }
  return improved;
}

}  // namespace moesaic::carve
