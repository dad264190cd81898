#include "parallel/placement/baseline_slots.h"

#include <algorithm>
#include <numeric>

namespace moesaic::parallel {

bool HoldsExpert(const std::vector<int>& rank, int expert) {
  return std::find(rank.begin(), rank.end(), expert) != rank.end();
}

std::vector<int> DescendingOrder(std::span<const double> values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

Status CheckBaselineSlots(const LoadMatrix& load, int ranks, int slots_per_rank) {
  if (ranks < 1 || ranks > kMaxRanks)
    return InvalidArgument("ranks must be from 1 to {}, found {}", kMaxRanks, ranks);
  if (slots_per_rank < 1 || slots_per_rank > load.experts)
    return InvalidArgument("slots of a rank must be from 1 to the {} experts, found {}", load.experts,
                           slots_per_rank);
  if (int64_t{ranks} * slots_per_rank < load.experts)
    return InvalidArgument("slots must hold the {} experts, found {}", load.experts,
                           int64_t{ranks} * slots_per_rank);
  return OkStatus();
}

LayerPlacement StartOfVllm(int experts, int ranks, int slots_per_rank) {
  LayerPlacement layer(ranks);
  int next = 0;
  for (std::vector<int>& rank : layer) {
    for (int slot = 0; slot < slots_per_rank; ++slot) rank.push_back(next++ % experts);
  }
  return layer;
}

}  // namespace moesaic::parallel
