#include "parallel/placement/layer_search.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "parallel/placement/pair_counts.h"

namespace moesaic::parallel {
namespace {

constexpr double kMinGain = 1e-5;  // relative; below it, f32 rounding decides
constexpr int kSearchedRanks =
    16;  // costliest ranks that a step may start from; more take 4x the time for 0.4%
// Of 256 experts in 288 slots. 100 times as many lower the largest load by 0.1%.
constexpr int kPairTries = 8000;

inline float Power16(float x) {
  x *= x;
  x *= x;
  x *= x;
  return x * x;
}

}  // namespace

LayerSearch::LayerSearch(const ScenarioLoads& loads, std::span<const double> speeds,
                         std::span<const int> slots, HomeNodes homes)
    : scenario_(loads),
      experts_(loads.experts()),
      padded_(loads.padded()),
      slots_(slots.begin(), slots.end()),
      units_(loads.loads),
      shares_(experts_),
      scratch_(static_cast<size_t>(padded_) * 2),
      homes_(std::move(homes)),
      away_(experts_, 0) {
  for (const double speed : speeds) inverse_speed_.push_back(static_cast<float>(1 / speed));
  if (homes_.weight <= 0) return;
  mean_share_.assign(experts_, 0);
  double total = 0;
  for (int e = 0; e < experts_; ++e) {
    for (int s = 0; s < scenario_.scenarios; ++s)
      mean_share_[e] += scenario_.loads[static_cast<size_t>(e) * padded_ + s];
    total += mean_share_[e];
  }
  for (double& share : mean_share_) share /= total;
}

double LayerSearch::Changed(int rank, const float* take, const float* add) const {
  const float* now = load(rank);
  const float scale = inverse_speed_[rank] * scale_;
  float sums[4] = {};
  for (int s = 0; s < padded_; s += 4) {
    for (int lane = 0; lane < 4; ++lane) {
      float value = now[s + lane];
      if (take != nullptr) value -= take[s + lane];
      if (add != nullptr) value += add[s + lane];
      sums[lane] += Power16(value * scale);
    }
  }
  const double sum = double{sums[0]} + sums[1] + sums[2] + sums[3];
  return scenario_.scenarios == 1 ? sum * sum * sum * sum : sum;
}

std::vector<int> LayerSearch::ReplicaCounts() {
  const int ranks = static_cast<int>(slots_.size());
  const int total = std::accumulate(slots_.begin(), slots_.end(), 0);
  std::vector<int> copies(experts_, 1), all(experts_);
  std::iota(all.begin(), all.end(), 0);
  AddCopies(all, total - experts_, ranks, copies);
  return copies;
}

std::vector<int> LayerSearch::HomeReplicaCounts() {
  if (homes_.weight <= 0) return {};
  const int nodes = 1 + *std::max_element(homes_.of_rank.begin(), homes_.of_rank.end());
  std::vector<int> copies(experts_, 1);
  for (int node = 0; node < nodes; ++node) {
    int spare = 0, ranks = 0;
    for (size_t rank = 0; rank < slots_.size(); ++rank) {
      if (homes_.of_rank[rank] != node) continue;
      spare += slots_[rank];
      ++ranks;
    }
    std::vector<int> own;
    for (int e = 0; e < experts_; ++e) {
      if (homes_.of_expert[e] == node) own.push_back(e);
    }
    spare -= static_cast<int>(own.size());
    if (spare < 0) return {};
    AddCopies(own, spare, ranks, copies);
  }
  return copies;
}

// Gives each of `spare` replicas to the one of `experts` with the largest load per replica in any scenario.
void LayerSearch::AddCopies(std::span<const int> experts, int spare, int most, std::vector<int>& copies) {
  for (; spare > 0; --spare) {
    int best = -1;
    for (const int e : experts) {
      if (copies[e] >= most) continue;
      if (best < 0 || Size(e, copies[e]) > Size(best, copies[best])) best = e;
    }
    if (best < 0) return;  // every rank holds every expert
    ++copies[best];
  }
}

const float* LayerSearch::Share(int expert, int copies) {
  std::vector<std::vector<float>>& by_copies = shares_[expert];
  const float* row = scenario_.loads.data() + static_cast<size_t>(expert) * padded_;
  while (static_cast<int>(by_copies.size()) < copies) {
    const auto count = static_cast<float>(by_copies.size() + 1);
    std::vector<float>& share = by_copies.emplace_back(row, row + padded_);
    for (int s = 0; s < padded_; ++s) {
      share[s] /= count;
      if (scenario_.time != nullptr && s < scenario_.scenarios)
        share[s] = static_cast<float>((*scenario_.time)(share[s] * scenario_.rows) * scenario_.scale[s]);
    }
  }
  return by_copies[copies - 1].data();
}

float LayerSearch::Size(int expert, int copies) {
  const float* share = Share(expert, copies);
  return *std::max_element(share, share + scenario_.scenarios);
}

void LayerSearch::SetUnit(int expert) {
  const float* share = Share(expert, std::max(1, copies_[expert]));
  std::copy(share, share + padded_, units_.begin() + static_cast<std::ptrdiff_t>(expert) * padded_);
}

void LayerSearch::Put(int rank, int expert) {
  layer_[rank].push_back(expert);
  holds_[static_cast<size_t>(rank) * experts_ + expert] = 1;
  ranks_of_[expert].push_back(rank);
  away_[expert] += Away(expert, rank);
  float* sum = load(rank);
  for (int s = 0; s < padded_; ++s) sum[s] += unit(expert)[s];
  cost_[rank] = RankCost(rank);
}

void LayerSearch::Place(const std::vector<int>& copies) {
  const int ranks = static_cast<int>(slots_.size());
  copies_ = copies;
  layer_.assign(ranks, {});
  ranks_of_.assign(experts_, {});
  away_.assign(experts_, 0);
  holds_.assign(static_cast<size_t>(ranks) * experts_, 0);
  rank_load_.assign(static_cast<size_t>(ranks) * padded_, 0);
  cost_.assign(ranks, 0);
  SetScale();
  std::vector<float> size(experts_, 0);
  for (int e = 0; e < experts_; ++e) {
    SetUnit(e);
    size[e] = *std::max_element(unit(e), unit(e) + scenario_.scenarios);
  }
  std::vector<int> order(experts_);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return size[a] != size[b] ? size[a] > size[b] : a < b; });
  for (const int expert : order) {
    for (int copy = 0; copy < copies[expert]; ++copy) {
      int best = -1;
      double least = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (static_cast<int>(layer_[rank].size()) >= slots_[rank] || Holds(rank, expert)) continue;
        const double growth = Changed(rank, nullptr, unit(expert)) - cost_[rank] +
                              AwayCost(expert, Away(expert, rank), copies_[expert]);
        if (best < 0 || growth < least) {
          best = rank;
          least = growth;
        }
      }
      if (best >= 0) {
        Put(best, expert);
        continue;
      }
      // All ranks with room hold the expert: another rank takes it and gives one of its experts to such a
      // rank.
      bool placed = false;
      for (int open = 0; open < ranks && !placed; ++open) {
        if (static_cast<int>(layer_[open].size()) >= slots_[open]) continue;
        for (int rank = 0; rank < ranks && !placed; ++rank) {
          if (Holds(rank, expert)) continue;
          for (size_t slot = 0; slot < layer_[rank].size() && !placed; ++slot) {
            const int other = layer_[rank][slot];
            if (Holds(open, other)) continue;
            layer_[rank][slot] = expert;
            layer_[open].push_back(other);
            Recompute();
            placed = true;
          }
        }
      }
      if (!placed) --copies_[expert];
    }
  }
  Recompute();
  start_ = layer_;
}

void LayerSearch::Start(const LayerPlacement& layer) {
  layer_ = layer;
  copies_ = CopiesOf(layer, experts_);
  rank_load_.assign(layer.size() * padded_, 0);
  cost_.assign(layer.size(), 0);
  SetScale();
  Recompute();
  start_ = layer_;
}

// Powers of loads stay far below the largest float: a rank at the bound of any placement with these replicas
// is at 1.
void LayerSearch::SetScale() {
  if (scale_ > 0) return;
  float bound = 1;
  for (int e = 0; e < experts_; ++e) bound = std::max(bound, Size(e, std::max(1, copies_[e])));
  scale_ = 1 / bound;
  const double balanced = std::pow(double{scale_}, scenario_.scenarios == 1 ? 64 : 16);
  away_unit_ = homes_.weight * balanced * static_cast<double>(slots_.size()) * scenario_.scenarios;
}

void LayerSearch::Recompute() {
  const int ranks = static_cast<int>(layer_.size());
  ranks_of_.assign(experts_, {});
  away_.assign(experts_, 0);
  holds_.assign(static_cast<size_t>(ranks) * experts_, 0);
  for (int e = 0; e < experts_; ++e) SetUnit(e);
  for (int rank = 0; rank < ranks; ++rank) {
    float* sum = load(rank);
    std::fill(sum, sum + padded_, 0.0F);
    for (const int expert : layer_[rank]) {
      ranks_of_[expert].push_back(rank);
      away_[expert] += Away(expert, rank);
      holds_[static_cast<size_t>(rank) * experts_ + expert] = 1;
      for (int s = 0; s < padded_; ++s) sum[s] += unit(expert)[s];
    }
    cost_[rank] = RankCost(rank);
  }
}

void LayerSearch::FindSwaps(int rank, bool must_gain, Step& best) const {
  const int ranks = static_cast<int>(layer_.size());
  for (int slot = 0; slot < static_cast<int>(layer_[rank].size()); ++slot) {
    const int a = layer_[rank][slot];
    for (int other = 0; other < ranks; ++other) {
      if (other == rank || Holds(other, a)) continue;
      const double before = cost_[rank] + cost_[other];
      if (static_cast<int>(layer_[other].size()) < slots_[other]) {
        const double gain = before - Changed(rank, unit(a), nullptr) - Changed(other, nullptr, unit(a)) -
                            AwayCost(a, Away(a, other) - Away(a, rank), copies_[a]);
        if (gain > best.gain) best = {gain, Step::kMove, rank, slot, other, 0, 0};
      }
      for (int slot_b = 0; slot_b < static_cast<int>(layer_[other].size()); ++slot_b) {
        const int b = layer_[other][slot_b];
        if (Holds(rank, b)) continue;
        const double mine = Changed(rank, unit(a), unit(b));
        if (must_gain && mine >= cost_[rank]) continue;
        const double gain = before - mine - Changed(other, unit(b), unit(a)) -
                            AwayCost(a, Away(a, other) - Away(a, rank), copies_[a]) -
                            AwayCost(b, Away(b, rank) - Away(b, other), copies_[b]);
        if (gain > best.gain) best = {gain, Step::kSwap, rank, slot, other, slot_b, 0};
      }
    }
  }
}

// Gain in the cost of tokens away from home by a further replica of `expert` on rank b.
double LayerSearch::AwayGain(int expert, int rank_b) const {
  return AwayCost(expert, away_[expert], copies_[expert]) -
         AwayCost(expert, away_[expert] + Away(expert, rank_b), copies_[expert] + 1);
}

// Gain of replacing the expert of slot b, which has other replicas, by a further replica of `expert`.
double LayerSearch::ExchangeGain(int expert, int rank_b, int slot_b) {
  const int old = layer_[rank_b][slot_b];
  const float* share = Share(expert, copies_[expert] + 1);
  const float* old_share = Share(old, copies_[old] - 1);
  float* less = scratch_.data();
  float* more = scratch_.data() + padded_;
  for (int s = 0; s < padded_; ++s) {
    less[s] = unit(expert)[s] - share[s];
    more[s] = old_share[s] - unit(old)[s];
  }
  double gain = AwayGain(expert, rank_b) + AwayCost(old, away_[old], copies_[old]) -
                AwayCost(old, away_[old] - Away(old, rank_b), copies_[old] - 1);
  for (const int rank : ranks_of_[expert])
    gain += cost_[rank] - Changed(rank, less, Holds(rank, old) ? more : nullptr);
  for (const int rank : ranks_of_[old]) {
    if (rank != rank_b && !Holds(rank, expert)) gain += cost_[rank] - Changed(rank, nullptr, more);
  }
  return gain + cost_[rank_b] - Changed(rank_b, unit(old), share);
}

// Gain of a further replica of `expert` in an empty slot of rank b.
double LayerSearch::AdditionGain(int expert, int rank_b) {
  const float* share = Share(expert, copies_[expert] + 1);
  float* less = scratch_.data();
  for (int s = 0; s < padded_; ++s) less[s] = unit(expert)[s] - share[s];
  double gain = AwayGain(expert, rank_b) + cost_[rank_b] - Changed(rank_b, nullptr, share);
  for (const int rank : ranks_of_[expert]) gain += cost_[rank] - Changed(rank, less, nullptr);
  return gain;
}

void LayerSearch::FindExchanges(int rank, Step& best) {
  const int ranks = static_cast<int>(layer_.size());
  for (const int expert : layer_[rank]) {
    for (int other = 0; other < ranks; ++other) {
      if (Holds(other, expert)) continue;
      if (static_cast<int>(layer_[other].size()) < slots_[other]) {
        const double gain = AdditionGain(expert, other);
        if (gain > best.gain) best = {gain, Step::kAdd, 0, 0, other, 0, expert};
      }
      for (int slot = 0; slot < static_cast<int>(layer_[other].size()); ++slot) {
        if (copies_[layer_[other][slot]] < 2) continue;
        const double gain = ExchangeGain(expert, other, slot);
        if (gain > best.gain) best = {gain, Step::kExchange, 0, 0, other, slot, expert};
      }
    }
  }
  // Or the loaded rank gives up one of its own replicas for a colder expert.
  for (int slot = 0; slot < static_cast<int>(layer_[rank].size()); ++slot) {
    const int old = layer_[rank][slot];
    if (copies_[old] < 2) continue;
    for (int expert = 0; expert < experts_; ++expert) {
      if (Holds(rank, expert)) continue;
      const double gain = ExchangeGain(expert, rank, slot);
      if (gain > best.gain) best = {gain, Step::kExchange, 0, 0, rank, slot, expert};
    }
  }
}

void LayerSearch::Apply(const Step& step) {
  if (step.kind == Step::kSwap) {
    std::swap(layer_[step.rank_a][step.slot_a], layer_[step.rank_b][step.slot_b]);
  } else if (step.kind == Step::kMove) {
    std::vector<int>& from = layer_[step.rank_a];
    layer_[step.rank_b].push_back(from[step.slot_a]);
    from.erase(from.begin() + step.slot_a);
  } else if (step.kind == Step::kAdd) {
    layer_[step.rank_b].push_back(step.expert);
    ++copies_[step.expert];
  } else {
    int& slot = layer_[step.rank_b][step.slot_b];
    --copies_[slot];
    slot = step.expert;
    ++copies_[slot];
  }
  Recompute();
}

int LayerSearch::Moved() const {
  int moved = 0;
  for (size_t rank = 0; rank < layer_.size(); ++rank) {
    for (const int expert : layer_[rank])
      moved += std::find(start_[rank].begin(), start_[rank].end(), expert) == start_[rank].end() ? 1 : 0;
  }
  return moved;
}

int LayerSearch::Improve(int max_steps, const std::function<bool()>& stop, int max_moves) {
  const int ranks = static_cast<int>(layer_.size());
  std::vector<int> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  LayerPlacement least = layer_;  // with the smallest worst() so far
  double least_worst = max_moves >= 0 ? worst() : 0;
  int steps = 0;
  for (; steps < max_steps; ++steps) {
    if (stop && stop()) break;
    const double total = objective();
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return cost_[a] != cost_[b] ? cost_[a] > cost_[b] : a < b; });
    Step best;
    best.gain = kMinGain * total;
    // Most steps are found at the first rank; the sixteenth gains little.
    for (int i = 0;
         i < std::min(ranks, kSearchedRanks) && best.kind == Step::kNone && cost_[order[i]] > total * 1e-3;
         ++i) {
      FindSwaps(order[i], /*must_gain=*/true, best);
      FindExchanges(order[i], best);
    }
    // If many experts are away from their home nodes, the ranks' loads are a small part of the objective, and
    // the loop above may search no rank. A swap that brings an expert home may then raise the loads of both
    // ranks.
    const bool mostly_away = std::accumulate(cost_.begin(), cost_.end(), 0.0) < total / 2;
    for (int i = 0; i < ranks && best.kind == Step::kNone && mostly_away; ++i) {
      FindSwaps(order[i], /*must_gain=*/false, best);
      FindExchanges(order[i], best);
    }
    if (best.kind == Step::kNone) break;
    Apply(best);
    if (max_moves < 0) continue;
    if (Moved() > max_moves) break;
    if (worst() >= least_worst) continue;
    least_worst = worst();
    least = layer_;
  }
  if (max_moves >= 0) {
    layer_ = least;
    copies_ = CopiesOf(layer_, experts_);
    Recompute();
  }
  return steps;
}

int LayerSearch::CopiesWithin(int expert, float limit) {
  const int ranks = static_cast<int>(slots_.size());
  if (scenario_.time == nullptr)
    return std::clamp(static_cast<int>(std::ceil(Size(expert, 1) / limit)), 1, ranks);
  int copies = 1;
  while (copies < ranks && Size(expert, copies) > limit) ++copies;
  return copies;
}

void LayerSearch::TryLimits(int max_tries, const std::function<bool()>& stop) {
  constexpr float kStep = 0.04F;  // between limits
  const int ranks = static_cast<int>(slots_.size());
  const int total = std::accumulate(slots_.begin(), slots_.end(), 0);
  float least = 0;
  for (int e = 0; e < experts_; ++e) least = std::max(least, Size(e, copies_[e]));
  LayerPlacement best = layer_;
  double best_cost = objective();
  std::vector<int> last;
  for (int attempt = 1; attempt <= max_tries && !(stop && stop()); ++attempt) {
    const float limit = least * (1 + kStep * static_cast<float>(attempt));
    std::vector<int> copies(experts_);
    int spare = total;
    for (int e = 0; e < experts_; ++e) {
      copies[e] = CopiesWithin(e, limit);
      spare -= copies[e];
    }
    // Spare replicas split the largest single experts, and then the largest of all.
    for (const bool single : {true, false}) {
      while (spare > 0) {
        int largest = -1;
        for (int e = 0; e < experts_; ++e) {
          if (copies[e] >= ranks || (single && copies[e] > 1)) continue;
          if (largest < 0 || Size(e, copies[e]) > Size(largest, copies[largest])) largest = e;
        }
        if (largest < 0) break;
        ++copies[largest];
        --spare;
      }
    }
    if (spare < 0 || copies == last) continue;
    last = copies;
    Place(copies);
    if (objective() >= best_cost * (1 - kMinGain)) continue;
    best_cost = objective();
    best = layer_;
  }
  Start(best);
}

bool LayerSearch::PairsDecide() const {
  return scenario_.scenarios == 1 && homes_.weight <= 0 &&
         std::all_of(slots_.begin(), slots_.end(), [](int slots) { return slots == 2; }) &&
         std::all_of(inverse_speed_.begin(), inverse_speed_.end(),
                     [&](float speed) { return speed == inverse_speed_[0]; }) &&
         std::accumulate(copies_.begin(), copies_.end(), 0) == 2 * static_cast<int>(slots_.size());
}

void LayerSearch::ImproveCounts(int max_tries, const std::function<bool()>& stop) {
  if (PairsDecide()) {
    const LayerPlacement before = layer_;
    const double least = objective();
    Place(SearchPairCounts(
        copies_, static_cast<int>(slots_.size()),
        [&](int expert, int copies) { return Size(expert, copies); }, kPairTries, stop));
    if (objective() > least) Start(before);
    return;
  }
  TryLimits(max_tries, stop);
  ShiftReplicas(max_tries, stop);
}

void LayerSearch::ShiftReplicas(int max_tries, const std::function<bool()>& stop) {
  constexpr int kCandidates = 5;  // receivers and donors per round
  std::vector<float> size(experts_), without(experts_);
  std::vector<int> by_size(experts_), donors;
  for (int tries = 0; tries < max_tries;) {
    donors.clear();
    for (int e = 0; e < experts_; ++e) {
      size[e] = Size(e, copies_[e]);
      if (copies_[e] < 2) continue;
      without[e] = Size(e, copies_[e] - 1);
      donors.push_back(e);
    }
    std::iota(by_size.begin(), by_size.end(), 0);
    std::stable_sort(by_size.begin(), by_size.end(), [&](int a, int b) { return size[a] > size[b]; });
    std::stable_sort(donors.begin(), donors.end(), [&](int a, int b) { return without[a] < without[b]; });
    // Experts of the costliest rank come first: they bound the objective.
    const auto worst = std::max_element(cost_.begin(), cost_.end()) - cost_.begin();
    std::vector<int> receivers = layer_[worst];
    for (int i = 0; i < std::min(kCandidates, experts_); ++i) receivers.push_back(by_size[i]);
    const LayerPlacement before = layer_;
    const std::vector<int> copies = copies_;
    const double least = objective() * (1 - kMinGain);
    bool improved = false;
    for (const int receiver : receivers) {
      for (size_t d = 0; d < donors.size() && d < kCandidates && !improved && tries < max_tries; ++d) {
        if (donors[d] == receiver || copies[receiver] >= static_cast<int>(slots_.size())) continue;
        if (stop && stop()) tries = max_tries;
        ++tries;
        std::vector<int> changed = copies;
        ++changed[receiver];
        --changed[donors[d]];
        Place(changed);
        improved = objective() < least;
      }
      if (improved) break;
    }
    if (improved) continue;
    Start(before);
    return;
  }
}

double LayerSearch::objective() const {
  double sum = std::accumulate(cost_.begin(), cost_.end(), 0.0);
  for (int e = 0; e < experts_; ++e) sum += AwayCost(e, away_[e], std::max(1, copies_[e]));
  return sum;
}

double LayerSearch::worst() const {
  double worst = 0;
  for (int s = 0; s < scenario_.scenarios; ++s) worst = std::max(worst, WorstIn(s));
  return worst;
}

double LayerSearch::WorstIn(int scenario) const {
  float worst = 0;
  for (int rank = 0; rank < static_cast<int>(layer_.size()); ++rank)
    worst = std::max(worst, load(rank)[scenario] * inverse_speed_[rank]);
  return worst;
}

}  // namespace moesaic::parallel
