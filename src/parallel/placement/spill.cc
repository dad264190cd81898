#include "parallel/placement/spill.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

namespace moesaic::parallel {
namespace {

constexpr int kBisections = 14;       // to 1e-4 of the range between the mean and the start
constexpr double kNegligible = 1e-9;  // excess, relative to the threshold

struct Attempt {
  std::vector<SpillMove> moves;
  double above = 0;  // load above the threshold that remains
};

// The replica that relieves ranks above the threshold most: of an expert whose ranks are above it together,
// on the rank with most room. Returns the load that it takes; 0 if none.
double BestMove(const TokenSplit& split, std::span<const int> prefetched, double threshold,
                int prefetch_slots, SpillMove& move) {
  std::vector<std::pair<double, int>> open;  // room, rank
  for (int rank = 0; rank < split.ranks(); ++rank) {
    const double room = threshold * split.speed(rank) - split.rank_loads()[rank];
    if (room > 0 && prefetched[rank] < prefetch_slots) open.emplace_back(room, rank);
  }
  std::ranges::sort(open, [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  struct Relief {
    double load = 0, most = 0;  // of all ranks, and of the rank `from`
    int from = 0;
  };
  std::map<int, Relief> experts;  // experts on ranks above the threshold
  for (int rank = 0; rank < split.ranks(); ++rank) {
    const double excess = split.rank_loads()[rank] - threshold * split.speed(rank);
    if (excess <= 0) continue;
    for (const int expert : split.ExpertsOn(rank)) {
      const double load = std::min(excess, split.LoadOn(expert, rank));
      Relief& relief = experts[expert];
      relief.load += load;
      if (load > relief.most) relief = {relief.load, load, rank};
    }
  }
  double best = 0;
  for (const auto& [expert, relief] : experts) {
    for (const auto& [room, to] : open) {
      if (split.Holds(expert, to)) continue;
      const double amount = std::min(relief.load, room);
      if (amount > best) {
        best = amount;
        move = {expert, relief.from, to};
      }
      break;
    }
  }
  return best;
}

// Adds replicas until no rank is above the threshold, or the moves are used up.
Attempt SpillTo(TokenSplit& split, double threshold, int max_moves, const SpillOptions& options) {
  Attempt attempt;
  std::vector<int> prefetched(options.held.begin(), options.held.end());
  prefetched.resize(split.ranks(), 0);
  attempt.above = split.Relax(threshold);
  while (attempt.above > kNegligible * threshold && static_cast<int>(attempt.moves.size()) < max_moves) {
    SpillMove move;
    if (BestMove(split, prefetched, threshold, options.prefetch_slots, move) <= kNegligible * threshold)
      break;
    split.AddReplica(move.expert, move.to);
    ++prefetched[move.to];
    attempt.moves.push_back(move);
    attempt.above = split.Relax(threshold);
  }
  return attempt;
}

}  // namespace

SpillPlan PlanSpill(TokenSplit& split, std::span<const double> loads, const SpillOptions& options) {
  SpillPlan plan;
  plan.before = plan.after = split.Solve(loads);
  double speed = 0;
  for (int rank = 0; rank < split.ranks(); ++rank) speed += split.speed(rank);
  const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / speed;
  int max_moves = options.max_moves;
  if (options.expert_bytes > 0)
    max_moves = static_cast<int>(std::min<int64_t>(max_moves, options.max_bytes / options.expert_bytes));
  double low = mean * (1 + options.tolerance), high = plan.before;
  if (max_moves < 1 || high <= low * (1 + kNegligible)) return plan;
  const TokenSplit start = split;
  // The first attempt is at the tolerance itself; bisection follows only if that takes too many moves.
  for (int i = 0; i <= kBisections; ++i) {
    const double threshold = i == 0 ? low : (low + high) / 2;
    TokenSplit trial = start;
    Attempt attempt = SpillTo(trial, threshold, max_moves, options);
    double worst = 0;
    for (int rank = 0; rank < trial.ranks(); ++rank)
      worst = std::max(worst, trial.rank_loads()[rank] / trial.speed(rank));
    const bool reached = attempt.above <= kNegligible * threshold;
    if (worst < plan.after) {
      plan.after = worst;
      plan.moves = std::move(attempt.moves);
      split = std::move(trial);
    }
    if (reached && i == 0) break;
    (reached ? high : low) = threshold;
  }
  return plan;
}

}  // namespace moesaic::parallel
