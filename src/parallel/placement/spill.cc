#include "parallel/placement/spill.h"

#include <algorithm>
#include <numeric>

namespace moesaic::parallel {
namespace {

constexpr int kBisections = 14;       // to 1e-4 of the range between the mean and the start
constexpr double kNegligible = 1e-9;  // excess, relative to the threshold

struct Attempt {
  std::vector<SpillMove> moves;
  double above = 0;  // load above the threshold that remains
};

// The move that passes on most load from `from`; amount 0 if none.
double BestMove(const TokenSplit& split, std::span<const int> prefetched, double threshold,
                int prefetch_slots, SpillMove& move) {
  const double excess = split.rank_loads()[move.from] - threshold * split.speed(move.from);
  double best = 0, best_load = 0;
  for (const int expert : split.ExpertsOn(move.from)) {
    const double load = split.LoadOn(expert, move.from);
    if (std::min(load, excess) < best) continue;
    for (int to = 0; to < split.ranks(); ++to) {
      if (prefetched[to] >= prefetch_slots || split.Holds(expert, to)) continue;
      const double room = threshold * split.speed(to) - split.rank_loads()[to];
      const double amount = std::min({load, excess, room});
      if (amount > best || (amount == best && amount > 0 && load > best_load)) {
        best = amount;
        best_load = load;
        move.expert = expert;
        move.to = to;
      }
    }
  }
  return best;
}

// Moves experts until no rank is above the threshold, or the moves are used up.
Attempt SpillTo(TokenSplit& split, double threshold, int max_moves, int prefetch_slots) {
  Attempt attempt;
  std::vector<int> prefetched(split.ranks(), 0);
  std::vector<char> stuck(split.ranks(), 0);
  attempt.above = split.Relax(threshold);
  while (attempt.above > kNegligible * threshold && static_cast<int>(attempt.moves.size()) < max_moves) {
    SpillMove move{.from = -1};
    double most = kNegligible * threshold;
    for (int rank = 0; rank < split.ranks(); ++rank) {
      const double excess = split.rank_loads()[rank] - threshold * split.speed(rank);
      if (stuck[rank] || excess <= most) continue;
      most = excess;
      move.from = rank;
    }
    if (move.from < 0) break;
    if (BestMove(split, prefetched, threshold, prefetch_slots, move) <= kNegligible * threshold) {
      stuck[move.from] = 1;
      continue;
    }
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
    Attempt attempt = SpillTo(trial, threshold, max_moves, options.prefetch_slots);
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
