#include "parallel/placement/node_traffic.h"

#include <algorithm>
#include <numeric>

namespace moesaic::parallel {
namespace {

// Probabilities of a token's choice.
struct Choice {
  std::vector<double> group;   // [groups]
  std::vector<double> expert;  // [experts], if its group is chosen
};

Choice ChoiceOf(std::span<const double> loads, double total, const Routing& routing) {
  Choice choice;
  for (const double load : loads) choice.expert.push_back(std::min(1.0, routing.top_k * load / total));
  const size_t size = loads.size() / static_cast<size_t>(routing.groups);
  for (int group = 0; group < routing.groups; ++group) {
    const auto first = choice.expert.begin() + static_cast<std::ptrdiff_t>(group * size);
    const auto last = first + static_cast<std::ptrdiff_t>(size);
    const double experts = std::accumulate(first, last, 0.0);
    // A chosen group gives top_k / top_groups experts on average. It is chosen at least as often as its
    // hottest expert.
    const double chosen =
        std::min(1.0, std::max(experts * routing.top_groups / routing.top_k, *std::max_element(first, last)));
    choice.group.push_back(chosen);
    if (chosen > 0) std::for_each(first, last, [&](double& expert) { expert /= chosen; });
  }
  return choice;
}

}  // namespace

Status CheckRouting(const Routing& routing, int experts) {
  if (routing.groups < 1 || experts % routing.groups != 0)
    return InvalidArgument("groups must divide the {} experts, found {}", experts, routing.groups);
  if (routing.top_groups < 1 || routing.top_groups > routing.groups)
    return InvalidArgument("groups of a token must be from 1 to {}, found {}", routing.groups,
                           routing.top_groups);
  const int most = experts / routing.groups * routing.top_groups;
  if (routing.top_k < 1 || routing.top_k > most)
    return InvalidArgument("experts of a token must be from 1 to {}, found {}", most, routing.top_k);
  return OkStatus();
}

double RemoteNodes(const LayerPlacement& layer, std::span<const double> loads, int nodes,
                   const Routing& routing) {
  const std::vector<double> received = TokensReceived(layer, loads, nodes, routing);
  return std::accumulate(received.begin(), received.end(), 0.0);
}

std::vector<double> TokensReceived(const LayerPlacement& layer, std::span<const double> loads, int nodes,
                                   const Routing& routing) {
  std::vector<double> received(nodes, 0);
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  if (!(total > 0)) return received;
  const Choice choice = ChoiceOf(loads, total, routing);
  const size_t experts = loads.size(), group_size = experts / static_cast<size_t>(routing.groups);
  std::vector<double> replicas(experts * nodes, 0);  // [nodes, experts]
  std::vector<double> copies(experts, 0);
  for (size_t rank = 0; rank < layer.size(); ++rank) {
    const size_t node = rank * nodes / layer.size();
    for (const int expert : layer[rank]) {
      ++replicas[node * experts + expert];
      ++copies[expert];
    }
  }
  for (int source = 0; source < nodes; ++source) {
    const double* here = replicas.data() + source * experts;
    for (int node = 0; node < nodes; ++node) {
      if (node == source) continue;
      const double* on_node = replicas.data() + node * experts;
      double never = 1;
      for (int group = 0; group < routing.groups; ++group) {
        double without = 1;
        for (size_t e = group * group_size; e < (group + 1) * group_size; ++e) {
          if (here[e] == 0 && on_node[e] > 0) without *= 1 - choice.expert[e] * on_node[e] / copies[e];
        }
        never *= 1 - choice.group[group] * (1 - without);
      }
      received[node] += (1 - never) / nodes;
    }
  }
  return received;
}

}  // namespace moesaic::parallel
