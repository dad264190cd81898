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
#include "engine/expert_plan.h"
#include "engine/lockstep.h"
#include "parallel/layout.h"

namespace moesaic::engine {

/// Numbers for /metrics, since the start.
struct ExpertBalanceStats {
  std::string state = "idle";  ///< idle, planning, moving, or changing: in use from the next step on
  int64_t plans = 0;           ///< That began; those that ended are counted by result.
  int64_t plans_with_moves = 0, plans_without_gain = 0, failed_plans = 0;
  int64_t moved_layers = 0, moved_experts = 0, rolled_back = 0;
  int64_t moved_bytes = 0;           ///< Weights that ranks sent.
  uint64_t epoch = 0;                ///< Number of the last move that is in use.
  std::vector<double> speeds;        ///< Relative speeds of the ranks in the last plan; empty: all equal.
  std::vector<std::string> history;  ///< The last events, the oldest first.
};

/// Moves experts between ranks to even out their loads. Called by the engine's thread between steps. A
/// planning thread makes the plans; one that fails is counted, and the next one is made after the interval. A
/// move that fails on any rank is cancelled on all ranks, which keep the experts that they have.
class ExpertBalancer {
 public:
  using Clock = std::chrono::steady_clock;

  /// `replicas` are the executors of all replicas, as Lockstep::Add() of `lockstep` returned them. Borrowed.
  ExpertBalancer(const parallel::Layout& layout, const models::ModelInfo& info, Lockstep& lockstep,
                 std::vector<Executor*> replicas, const ExpertBalanceOptions& options);

  ~ExpertBalancer();  ///< Ends a plan that is being made.
  ExpertBalancer(const ExpertBalancer&) = delete;
  ExpertBalancer& operator=(const ExpertBalancer&) = delete;

  /// Starts plans and moves that are due, and follows those under way. `load` may be null. `ranks` returns
  /// the work of all ranks so far. An error ends the job.
  Status Poll(const std::shared_ptr<const ExpertLoadStats>& load,
              const std::function<std::vector<RankStats>()>& ranks, Clock::time_point now);
  /// Continues without exactly these replicas, each of which is one rank. Cancels a move or plan that is
  /// under way; later ones are for the other replicas.
  void Exclude(const std::vector<int>& replicas, const std::string& why);
  const ExpertBalanceStats& stats() const { return stats_; }
  /// Placement in use. Empty before the first plan; experts are then where loading placed them.
  const PlacementByLayer& placement() const { return current_; }

 private:
  enum class State : uint8_t { kIdle, kPlanning, kMoving, kChanging };
  void SetLayers(const ExpertLoadStats& load);
  bool Plannable(const ExpertLoadStats& load);
  BalanceConditions Measure(const std::vector<RankStats>& ranks, double expert_share);
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
  // Times of the last plan, and of the last poll of a move.
  Clock::time_point planned_ = Clock::now(), polled_;
  double expert_seconds_ = 0;        // of all ranks at the last plan
  std::vector<RankStats> measured_;  // work of the ranks when speeds were last measured
  std::vector<double> speeds_;       // [ranks] relative; empty: all equal
  int64_t windows_ = 0;              // number of load windows at the last plan
  const std::shared_ptr<std::atomic<bool>> ending_ = std::make_shared<std::atomic<bool>>(false);
  std::future<StatusOr<std::vector<PlannedMove>>> plan_;
  std::shared_ptr<std::atomic<bool>> plan_ends_;  // set when the plan is cancelled
  bool plan_is_void_ = false;                     // the plan began with a rank that has died since
  std::deque<PlannedMove> queue_;                 // the first one is under way
  uint64_t number_ = 0;                           // number of the last move that began
  uint64_t steps_ = 0;                            // joint steps when the last move was applied
  double moving_s_ = 0;                           // seconds of the current move, idle time excluded
  std::set<int> failed_;                          // layers whose last move failed
  int64_t received_bytes_ = 0;                    // sum over moves of those of the rank that received most
  double step_seconds_ = 0;  // sum over moves of those of the rank that spent most on the move
  ExpertBalanceStats stats_;
};

}  // namespace moesaic::engine
