// Plans which experts move to which ranks, for recorded loads.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "engine/expert_load.h"
#include "engine/rank_stats.h"
#include "models/model_info.h"
#include "parallel/layout.h"
#include "parallel/placement/layer_cost.h"
#include "parallel/placement/load_matrix.h"
#include "parallel/placement/placement.h"

namespace moesaic::engine {

/// Rows that a rank must have computed before its speed is known.
inline constexpr int64_t kMinTimedRows = 4096;

struct ExpertBalanceOptions {
  double interval_s = 0;  ///< Minimum time between plans; 0: experts stay.
  int redundant = 0;      ///< Replicas of a layer beyond one of each expert.
  /// Minimum reduction of the largest rank load, as a fraction of it, for which a layer's experts move. 0:
  /// any reduction suffices, also one that saves less time than its move takes.
  double least_gain = 0.1;
  /// Minimum recent tokens of a layer's experts per rank for a plan. The load of a rank that got n tokens is
  /// known to about 1 / sqrt(n), here 5%, which must be well below least_gain.
  double least_tokens_per_rank = 400;
  /// Bytes of weights that a rank receives in a second of its steps' time, until moves have been measured.
  /// Moves advance between layers and while ranks wait; only the first delays steps.
  double move_bytes_per_s = 1e9;
  /// Parts of the recorded windows that are workloads of a plan, in addition to the recent loads; the worst
  /// workload counts. 0: the recent loads only.
  int workloads = 3;
  /// Plans use the ranks' speeds as measured in batches that are bound by computation, instead of those of
  /// the layout.
  bool measured_speeds = false;
  /// Links between groups of the ranks of an expert group. If there are any, plans minimize the time of a
  /// batch of `batch_tokens` tokens, as soon as the time of an expert's row has been measured. Empty: plans
  /// minimize the tokens of the busiest rank.
  std::vector<parallel::LinkLevel> levels = {};
  double batch_tokens = 0;
  double plan_limit_s = 300;  ///< Maximum seconds of a plan.
  double move_limit_s = 600;  ///< Maximum seconds of a move, idle time excluded.
  /// Called on the planning thread before it plans. An exception ends that plan. For tests; may be empty.
  std::function<void()> before_plan = {};
};

/// A planned move of one layer's experts.
struct PlannedMove {
  int layer = 0;                  // decoder layer
  parallel::LayerPlacement next;  // experts ascending on each rank
  std::vector<double> loads;      // [experts] recent loads that the plan used
  std::vector<double> speeds;     // [ranks] relative speeds that the plan used; empty: all equal
  int moved = 0;                  // most experts that one rank receives
  double before = 1, after = 1;   // largest load / speed of a rank over the mean, in the worst workload
};

/// Experts of each rank by decoder layer.
using PlacementByLayer = std::map<int, parallel::LayerPlacement>;

/// The placement with which the layers of `load` were loaded. `layout` exchanges tokens.
PlacementByLayer LoadedPlacement(const parallel::Layout& layout, const models::ModelInfo& info,
                                 const ExpertLoadStats& load);

/// The ranks and the model for which a plan is made.
struct BalanceConditions {
  int64_t expert_bytes = 0;
  double expert_share = 1;          // share of time in which the experts of a rank compute, in all layers
  std::vector<double> speeds = {};  // [ranks], relative; empty: equal ones
  double row_s = 0;                 // time of a row of an expert on a rank of speed 1; 0: unknown
  parallel::Routing routing = {};
  double token_bytes = 0;  // of a token on its way to another group and back
  /// [ranks] Ranks that get no experts. Experts that only they have stay theirs. Empty: all ranks live.
  std::vector<bool> dead = {};
};

/// Plans all layers for the recent loads and for parts of the windows at once: the worst of them counts.
/// Returns the layers whose gain over `current` is large enough, the largest gain first. The time by which a
/// layer's slowest experts become faster until the next plan must exceed the time that steps lose to the
/// move, unless least_gain is 0. Deterministic.
StatusOr<std::vector<PlannedMove>> PlanMoves(const PlacementByLayer& current, const ExpertLoadStats& load,
                                             const BalanceConditions& conditions,
                                             const ExpertBalanceOptions& options,
                                             const std::function<bool()>& stop = {});

/// The recent loads, and up to `parts` sums of adjacent windows with at least `least_tokens` tokens in each
/// layer. All have the layers of `load`.
std::vector<parallel::LoadMatrix> WorkloadsOf(const ExpertLoadStats& load, int parts, double least_tokens);

/// Computes relative speeds of the ranks of an expert group from the rows that they computed since `before`
/// and the time for them; ranks of all stages count to the group by `layout`. Those that are `dead`, if it is
/// not empty, get 1. Returns an empty vector if a living rank has too few rows, or if all differ by less than
/// a tenth.
std::vector<double> MeasuredSpeeds(const parallel::Layout& layout, const std::vector<RankStats>& before,
                                   const std::vector<RankStats>& now, const std::vector<bool>& dead);

}  // namespace moesaic::engine
