#include "parallel/placement/node_traffic.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "parallel/placement/random.h"

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

int NodeOf(int rank, int ranks, int nodes) { return static_cast<int>(int64_t{rank} * nodes / ranks); }

// Expected tokens from each node to each other one.
class NodePairs {
 public:
  // There are tokens.
  NodePairs(const LayerPlacement& layer, std::span<const double> loads, int nodes, const Routing& routing)
      : nodes_(nodes),
        experts_(loads.size()),
        choice_(ChoiceOf(loads, std::accumulate(loads.begin(), loads.end(), 0.0), routing)),
        replicas_(loads.size() * nodes, 0),
        copies_(loads.size(), 0),
        sent_(static_cast<size_t>(nodes) * nodes, 0) {
    const int ranks = static_cast<int>(layer.size());
    for (int rank = 0; rank < ranks; ++rank) {
      for (const int expert : layer[rank]) {
        ++replicas_[NodeOf(rank, ranks, nodes) * experts_ + expert];
        ++copies_[expert];
      }
    }
    for (int source = 0; source < nodes_; ++source) {
      for (int node = 0; node < nodes_; ++node) Update(source, node);
    }
  }

  double Sent(int source, int node) const { return sent_[static_cast<size_t>(source) * nodes_ + node]; }
  double Sum() const { return std::accumulate(sent_.begin(), sent_.end(), 0.0); }

  // Exchanges the experts of a rank of node a with those of a rank of node b.
  void Exchange(std::span<const int> of_a, int a, std::span<const int> of_b, int b) {
    for (const auto& [experts, from, to] : {std::tuple(of_a, a, b), std::tuple(of_b, b, a)}) {
      for (const int expert : experts) {
        --replicas_[from * experts_ + expert];
        ++replicas_[to * experts_ + expert];
      }
    }
    for (int node = 0; node < nodes_; ++node) {
      for (const int changed : {a, b}) {
        Update(changed, node);
        Update(node, changed);
      }
    }
  }

 private:
  void Update(int source, int node) {
    if (node == source) return;
    const double* const here = replicas_.data() + source * experts_;
    const double* const on_node = replicas_.data() + node * experts_;
    const size_t groups = choice_.group.size(), size = experts_ / groups;
    double never = 1;
    for (size_t group = 0; group < groups; ++group) {
      double without = 1;
      for (size_t e = group * size; e < (group + 1) * size; ++e) {
        if (here[e] == 0 && on_node[e] > 0) without *= 1 - choice_.expert[e] * on_node[e] / copies_[e];
      }
      never *= 1 - choice_.group[group] * (1 - without);
    }
    sent_[static_cast<size_t>(source) * nodes_ + node] = (1 - never) / nodes_;
  }

  const int nodes_;
  const size_t experts_;
  const Choice choice_;
  std::vector<double> replicas_;  // [nodes, experts]
  std::vector<double> copies_;    // [experts]
  std::vector<double> sent_;      // [nodes, nodes], from and to
};

constexpr int kOrderTries = 1000;        // of pairs of ranks
constexpr double kMinOrderGain = 1e-12;  // relative; below it, rounding decides

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
  const NodePairs pairs(layer, loads, nodes, routing);
  for (int node = 0; node < nodes; ++node) {
    for (int source = 0; source < nodes; ++source) received[node] += pairs.Sent(source, node);
  }
  return received;
}

LayerPlacement OrderRanks(LayerPlacement layer, std::span<const double> loads, std::span<const double> speeds,
                          int nodes, const Routing& routing) {
  const int ranks = static_cast<int>(layer.size());
  if (nodes < 2 || !(std::accumulate(loads.begin(), loads.end(), 0.0) > 0)) return layer;
  NodePairs pairs(layer, loads, nodes, routing);
  double least = pairs.Sum();
  Random random(1);
  for (int attempt = 0; attempt < kOrderTries; ++attempt) {
    const int a = random.Below(ranks), b = random.Below(ranks);
    const int node_a = NodeOf(a, ranks, nodes), node_b = NodeOf(b, ranks, nodes);
    if (node_a == node_b || layer[a].size() != layer[b].size()) continue;
    if (!speeds.empty() && speeds[a] != speeds[b]) continue;
    pairs.Exchange(layer[a], node_a, layer[b], node_b);
    const double sum = pairs.Sum();
    if (sum < least * (1 - kMinOrderGain)) {
      least = sum;
      std::swap(layer[a], layer[b]);
    } else {
      pairs.Exchange(layer[a], node_b, layer[b], node_a);
    }
  }
  return layer;
}

}  // namespace moesaic::parallel
