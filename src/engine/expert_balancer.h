// Moves experts to other ranks while the engine serves: plans from recorded loads, gathers the weights of one
// layer after the other, and has all ranks change to them in the same step.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/executor.h"
#include "engine/expert_load.h"
#include "engine/lockstep.h"
#include "parallel/layout.h"
#include "parallel/placement/layer_cost.h"
#include "parallel/placement/load_matrix.h"
#include "parallel/placement/placement.h"

namespace moesaic::engine {

struct ExpertBalanceOptions {
  double interval_s = 0;  ///< Least time between plans; 0: experts stay.
  int redundant = 0;      ///< Replicas of a layer beyond one of each expert.
  /// Least reduction of the largest load of a rank, as a share of it, for which a layer's experts move.
  double least_gain = 0.1;
  /// No plan is made for fewer recent tokens of a layer's experts per rank: the load of a rank that got n
  /// tokens is known to about 1 / sqrt(n), here 5%, which must be well below least_gain.
  double least_tokens_per_rank = 400;
  /// Bytes per second at which a rank sends and receives weights, until a move has been measured.
  double move_bytes_per_s = 1e9;
  /// Parts of the recorded windows for which a plan is good at once, in addition to the recent loads; 0:
  /// none.
  int workloads = 3;
  /// Plans use the speeds of ranks that batches bound by computation have shown, instead of those of the
  /// layout.
  bool measured_speeds = false;
  /// Links between groups of the ranks of an expert group. If there are any, plans are for the time of a
  /// batch of `batch_tokens` tokens, as soon as the time of an expert's row has been measured. Empty: for
  /// tokens.
  std::vector<parallel::LinkLevel> levels = {};
  double batch_tokens = 0;
  double plan_limit_s = 300;  ///< A plan that takes longer is given up.
  double move_limit_s = 600;  ///< So is a move, idle times not counted.
  /// Called by the thread of each plan before it plans, which its exceptions end. For tests; may be empty.
  std::function<void()> before_plan = {};
};

/// A layer whose experts shall move.
struct PlannedMove {
  int layer = 0;                  // decoder layer
  parallel::LayerPlacement next;  // experts ascending on each rank
  std::vector<double> loads;      // [experts] that it was planned for, recent ones
  std::vector<double> speeds;     // [ranks] that it was planned for; empty: equal ones
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
  double busy = 1;                  // share of time in which ranks compute
  std::vector<double> speeds = {};  // [ranks], relative; empty: equal ones
  double row_s = 0;                 // time of a row of an expert on a rank of speed 1; 0: unknown
  parallel::Routing routing = {};
  double token_bytes = 0;  // of a token on its way to another group and back
  /// [ranks] Ranks that get no experts. Experts that only they have stay theirs. Empty: all ranks live.
  std::vector<bool> dead = {};
};

/// Plans all layers for the recent loads and for parts of the windows at once: the worst of them counts.
/// Returns the layers whose gain over `current` is large enough, the largest gain first. The time that a
/// layer's ranks save until the next plan must exceed that of moving its experts. Deterministic.
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

/// Numbers for /metrics, since the start.
struct ExpertBalanceStats {
  std::string state = "idle";  ///< idle, planning or moving
  int64_t plans = 0, plans_without_gain = 0, failed_plans = 0;
  int64_t moved_layers = 0, moved_experts = 0, rolled_back = 0;
  int64_t moved_bytes = 0;           ///< Weights that ranks sent.
  uint64_t epoch = 0;                ///< Last move that is in use.
  std::vector<double> speeds;        ///< Of ranks, for which the last plan was made; empty: equal ones.
  std::vector<std::string> history;  ///< The last events, the oldest first.
};

/// Called by the engine's thread between steps. Plans are made by a thread of their own; one that fails is
/// counted, and the next one is made after the interval. A move that any rank fails is given up on all, which
/// keep the experts that they have.
class ExpertBalancer {
 public:
  using Clock = std::chrono::steady_clock;

  /// `replicas` are the executors of all replicas, of `lockstep`. Borrowed.
  ExpertBalancer(const parallel::Layout& layout, const models::ModelInfo& info, Lockstep& lockstep,
                 std::vector<Executor*> replicas, const ExpertBalanceOptions& options);

  ~ExpertBalancer();  ///< Ends a plan that is being made.
  ExpertBalancer(const ExpertBalancer&) = delete;
  ExpertBalancer& operator=(const ExpertBalancer&) = delete;

  /// `load` may be null. `ranks` returns the work of all ranks so far. An error is one of the job.
  Status Poll(const std::shared_ptr<const ExpertLoadStats>& load,
              const std::function<std::vector<RankStats>()>& ranks, Clock::time_point now);
  /// Continues without exactly these replicas, each of which is one rank: a move or plan that is under way is
  /// given up, and later ones are for the others.
  void Exclude(const std::vector<int>& replicas, const std::string& why);
  const ExpertBalanceStats& stats() const { return stats_; }
  /// In use. Empty before the first plan: that of loading.
  const PlacementByLayer& placement() const { return current_; }

 private:
  enum class State : uint8_t { kIdle, kPlanning, kMoving, kChanging };
  void SetLayers(const ExpertLoadStats& load);
  bool Plannable(const ExpertLoadStats& load);
  BalanceConditions Measure(const std::vector<RankStats>& ranks, double busy);
  void StartPlan(const std::shared_ptr<const ExpertLoadStats>& load, const std::vector<RankStats>& ranks,
                 Clock::time_point now);
  Status TakePlan(Clock::time_point now);
  Status BeginNext(Clock::time_point now);
  Status Watch(Clock::time_point now);
  Status RollBack(const std::string& why, Clock::time_point now);
  void Note(const std::string& event);
  std::vector<Executor*> Living() const;

  const parallel::Layout layout_;
  const models::ModelInfo info_;
  Lockstep& lockstep_;
  const std::vector<Executor*> replicas_;
  const ExpertBalanceOptions options_;
  std::vector<bool> dead_;  // [replicas_]
  PlacementByLayer current_;
  State state_ = State::kIdle;
  Clock::time_point planned_ = Clock::now(), polled_;  // the last plan, and look at a move
  double computing_ = 0;                               // seconds of all ranks at the last plan
  std::vector<RankStats> measured_;                    // at the last measure of speeds
  std::vector<double> speeds_;                         // [ranks]; empty: equal ones
  int64_t windows_ = 0;                                // that the last plan knew
  const std::shared_ptr<std::atomic<bool>> ending_ = std::make_shared<std::atomic<bool>>(false);
  std::future<StatusOr<std::vector<PlannedMove>>> plan_;
  std::shared_ptr<std::atomic<bool>> plan_ends_;  // set when the plan is given up
  bool plan_is_void_ = false;                     // it was begun for a rank that died since
  std::deque<PlannedMove> queue_;                 // the first one is under way
  uint64_t number_ = 0;                           // of the last move that began
  uint64_t steps_ = 0;                            // joint steps when the last move was applied
  double moving_s_ = 0;                           // of the move, without idle times
  std::set<int> failed_;                          // layers whose last move failed
  double move_bytes_per_s_;
  ExpertBalanceStats stats_;
};

}  // namespace moesaic::engine
