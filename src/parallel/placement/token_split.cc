#include "parallel/placement/token_split.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace moesaic::parallel {
namespace {

constexpr double kRounding = 1e-12;  // of thresholds, relative

}  // namespace

TokenSplit::TokenSplit(const LayerPlacement& layer, int experts, std::span<const double> speeds)
    : layer_(layer),
      experts_(experts),
      speeds_(speeds.begin(), speeds.end()),
      replica_(experts),
      experts_on_(layer.size()),
      uses_(layer.size()),
      rank_load_(layer.size(), 0),
      fixed_(layer.size(), 0),
      parent_rank_(layer.size()),
      parent_expert_(layer.size()),
      parent_from_(layer.size()),
      parent_to_(layer.size()),
      rank_mark_(layer.size(), 0),
      expert_mark_(experts, 0) {
  if (speeds_.empty()) speeds_.assign(layer.size(), 1.0);
  total_speed_ = std::accumulate(speeds_.begin(), speeds_.end(), 0.0);
  for (int rank = 0; rank < ranks(); ++rank) {
    for (const int expert : layer[rank]) {
      std::vector<Replica>& replicas = replica_[expert];
      if (!replicas.empty() && replicas.back().rank == rank) continue;
      replicas.push_back({.rank = rank});
      experts_on_[rank].push_back(expert);
    }
  }
  for (int expert = 0; expert < experts; ++expert) {
    if (replica_[expert].size() < 2) continue;
    order_.push_back(expert);
    for (int i = 0; i < static_cast<int>(replica_[expert].size()); ++i)
      uses_[replica_[expert][i].rank].push_back({expert, i});
  }
}

bool TokenSplit::Holds(int expert, int rank) const {
  return std::any_of(replica_[expert].begin(), replica_[expert].end(),
                     [&](const Replica& replica) { return replica.rank == rank; });
}

double TokenSplit::LoadOn(int expert, int rank) const {
  for (const Replica& replica : replica_[expert]) {
    if (replica.rank == rank) return replica.load;
  }
  return 0;
}

void TokenSplit::AddReplica(int expert, int rank) {
  MOESAIC_CHECK(!Holds(expert, rank));
  std::vector<Replica>& replicas = replica_[expert];
  replicas.push_back({.rank = rank});
  experts_on_[rank].push_back(expert);
  if (replicas.size() == 2) {
    order_.push_back(expert);
    uses_[replicas[0].rank].push_back({expert, 0});
    fixed_[replicas[0].rank] -= replicas[0].load;
  }
  uses_[rank].push_back({expert, static_cast<int>(replicas.size()) - 1});
}

// Fills the replicas' ranks like connected vessels.
void TokenSplit::Fill(int expert, double load) {
  std::vector<Replica>& replicas = replica_[expert];
  std::vector<int>& by_level = queue_;
  by_level.resize(replicas.size());
  std::iota(by_level.begin(), by_level.end(), 0);
  const auto level = [&](int i) { return rank_load_[replicas[i].rank] / speeds_[replicas[i].rank]; };
  std::sort(by_level.begin(), by_level.end(), [&](int a, int b) {
    return level(a) != level(b) ? level(a) < level(b) : replicas[a].rank < replicas[b].rank;
  });
  double speed = 0, held = load;  // held: the load and that of the ranks that are filled
  double height = 0;
  size_t filled = 0;
  while (filled < by_level.size()) {
    const int rank = replicas[by_level[filled]].rank;
    if (filled > 0 && rank_load_[rank] / speeds_[rank] >= height) break;
    speed += speeds_[rank];
    held += rank_load_[rank];
    height = held / speed;
    ++filled;
  }
  double left = load;
  for (size_t i = 0; i < filled; ++i) {
    Replica& replica = replicas[by_level[i]];
    const double part =
        i + 1 == filled ? left
                        : std::clamp(height * speeds_[replica.rank] - rank_load_[replica.rank], 0.0, left);
    replica.load = part;
    left -= part;
    rank_load_[replica.rank] += part;
  }
  for (size_t i = filled; i < by_level.size(); ++i) replicas[by_level[i]].load = 0;
}

void TokenSplit::Assign(std::span<const double> loads) {
  std::fill(rank_load_.begin(), rank_load_.end(), 0.0);
  for (int expert = 0; expert < experts_; ++expert) {
    if (replica_[expert].size() != 1) continue;
    replica_[expert][0].load = loads[expert];
    rank_load_[replica_[expert][0].rank] += loads[expert];
  }
  fixed_ = rank_load_;
  std::sort(order_.begin(), order_.end(),
            [&](int a, int b) { return loads[a] != loads[b] ? loads[a] > loads[b] : a < b; });
  for (const int expert : order_) Fill(expert, loads[expert]);
}

double TokenSplit::LowerBound() const {
  double bound = std::accumulate(rank_load_.begin(), rank_load_.end(), 0.0) / total_speed_;
  for (int rank = 0; rank < ranks(); ++rank) bound = std::max(bound, fixed_[rank] / speeds_[rank]);
  return bound;
}

bool TokenSplit::Augment(std::span<const double> limits, double slack) {
  ++mark_;
  queue_.clear();
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank_load_[rank] <= limits[rank] + slack) continue;
    rank_mark_[rank] = mark_;
    parent_rank_[rank] = -1;
    queue_.push_back(rank);
  }
  for (size_t head = 0; head < queue_.size(); ++head) {
    const int rank = queue_[head];
    for (const Use& use : uses_[rank]) {
      std::vector<Replica>& replicas = replica_[use.expert];
      if (expert_mark_[use.expert] == mark_ || replicas[use.replica].load <= slack) continue;
      expert_mark_[use.expert] = mark_;
      for (int i = 0; i < static_cast<int>(replicas.size()); ++i) {
        const int next = replicas[i].rank;
        if (rank_mark_[next] == mark_) continue;
        rank_mark_[next] = mark_;
        parent_rank_[next] = rank;
        parent_expert_[next] = use.expert;
        parent_from_[next] = use.replica;
        parent_to_[next] = i;
        queue_.push_back(next);
        double amount = limits[next] - rank_load_[next];
        if (amount <= slack) continue;
        int source = next;
        for (; parent_rank_[source] >= 0; source = parent_rank_[source])
          amount = std::min(amount, replica_[parent_expert_[source]][parent_from_[source]].load);
        amount = std::min(amount, rank_load_[source] - limits[source]);
        for (int at = next; parent_rank_[at] >= 0; at = parent_rank_[at]) {
          replica_[parent_expert_[at]][parent_from_[at]].load -= amount;
          replica_[parent_expert_[at]][parent_to_[at]].load += amount;
        }
        rank_load_[source] -= amount;
        rank_load_[next] += amount;
        return true;
      }
    }
  }
  return false;
}

double TokenSplit::CutThreshold() const {
  double load = 0, speed = 0;
  for (const int rank : queue_) {
    load += rank_load_[rank];
    speed += speeds_[rank];
  }
  return speed > 0 ? load / speed : 0;
}

double TokenSplit::RelaxTo(std::span<const double> limits, double slack) {
  while (Augment(limits, slack)) {
  }
  double above = 0;
  for (int rank = 0; rank < ranks(); ++rank) above += std::max(0.0, rank_load_[rank] - limits[rank]);
  return above;
}

double TokenSplit::Relax(double threshold) {
  std::vector<double> limits(speeds_);
  for (double& limit : limits) limit *= threshold;
  return RelaxTo(limits, threshold * kRounding * ranks());
}

double TokenSplit::Solve(std::span<const double> loads) {
  Assign(loads);
  double threshold = LowerBound();
  const double slack = threshold * kRounding * ranks();
  std::vector<double> limits(speeds_.size());
  for (;;) {
    for (int rank = 0; rank < ranks(); ++rank) limits[rank] = threshold * speeds_[rank];
    while (Augment(limits, slack)) {
    }
    const double cut = CutThreshold();
    if (queue_.empty() || cut <= threshold + slack) break;
    threshold = cut;
  }
  double worst = 0;
  for (int rank = 0; rank < ranks(); ++rank) worst = std::max(worst, rank_load_[rank] / speeds_[rank]);
  return worst;
}

std::vector<std::vector<int64_t>> TokenSplit::SplitTokens(std::span<const int64_t> tokens) {
  std::vector<double> loads(tokens.begin(), tokens.end());
  const double threshold = Solve(loads);
  // Whole numbers from here on: sums below 2^53 are exact, and paths move whole tokens. A flow of whole
  // tokens exists, as limits are whole and not below those of the fractional one.
  std::vector<double> limits(speeds_.size());
  for (int rank = 0; rank < ranks(); ++rank)
    limits[rank] = std::ceil(threshold * speeds_[rank] * (1 - kRounding * ranks()));
  std::fill(rank_load_.begin(), rank_load_.end(), 0.0);
  for (int expert = 0; expert < experts_; ++expert) {
    if (replica_[expert].empty()) continue;
    double left = loads[expert];
    for (Replica& replica : replica_[expert]) {
      replica.load = std::min(left, std::floor(replica.load + kRounding));
      left -= replica.load;
    }
    replica_[expert].front().load += left;
    for (const Replica& replica : replica_[expert]) rank_load_[replica.rank] += replica.load;
  }
  RelaxTo(limits, 0.5);
  std::vector<std::vector<int64_t>> result(layer_.size());
  for (int rank = 0; rank < ranks(); ++rank) {
    for (size_t slot = 0; slot < layer_[rank].size(); ++slot) {
      const int expert = layer_[rank][slot];
      const auto first = std::find(layer_[rank].begin(), layer_[rank].end(), expert);
      const bool repeated = first != layer_[rank].begin() + static_cast<std::ptrdiff_t>(slot);
      result[rank].push_back(repeated ? 0 : std::llround(LoadOn(expert, rank)));
    }
  }
  return result;
}

}  // namespace moesaic::parallel
