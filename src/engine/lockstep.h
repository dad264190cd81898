// Joint steps of replicas that divide the experts: when one of them computes rows, all take part in the
// exchanges of every layer with experts. docs/contracts/executors.md, X27 to X33, is normative.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"
#include "engine/executor.h"

namespace moesaic::engine {

/// Settings of a job that tolerates failed ranks. Each replica is one rank (X38 to X43).
struct Survival {
  comm::Transport* job = nullptr;  ///< Borrowed. Null: a failed rank ends the job.
  double time_limit_s = 60;        ///< Limit of a step. A silent rank that takes longer has failed.
  /// Called for each excluded rank. Its process may still exist.
  std::function<void(int rank)> on_excluded = {};
};

/// Collects the batches that replicas start, and runs them as one joint step when the first is waited for.
/// Replicas without rows run an empty batch. Nothing runs while no replica has rows. One thread.
class Lockstep {
 public:
  /// `stages` is the number of pipeline stages of each replica. They divide batches with `read_rows`
  /// (SplitForPipeline).
  explicit Lockstep(int stages, double read_rows = 1, Survival survival = {})
      : stages_(stages), read_rows_(read_rows), survival_(std::move(survival)) {}

  /// Adds the next replica, the one of this process first, and returns the executor for its engine. Once
  /// one of the executors is destroyed, none may be used, since each of them runs the batches of all.
  static std::unique_ptr<Executor> Add(const std::shared_ptr<Lockstep>& lockstep,
                                       std::unique_ptr<Executor> replica);

  /// The next joint step begins with this move of experts, which all ranks have reported as ready.
  void ApplyMove(uint64_t number) { move_ = number; }
  uint64_t steps() const { return steps_; }  ///< Joint steps so far.

  /// Looks for ranks that have failed and continues without them. Called between steps. An error ends the
  /// job.
  Status CheckRanks();
  /// Returns whether the job continues without the replica's rank.
  bool is_excluded(size_t replica) const { return replicas_[replica].excluded; }
  /// Ranks without which the job continues, ascending, and the reason for each, in the order of events.
  const std::vector<int>& excluded() const { return excluded_; }
  const std::vector<std::string>& failures() const { return failures_; }
  /// Error of the requests that ran on a replica which is excluded.
  Status FailureOf(size_t replica) const { return Lost(replicas_[replica]); }

 private:
  class Member;
  struct Replica {
    Executor* executor = nullptr;
    bool excluded = false;
    std::string reason = {};             // "rank 2 died"
    const StepBatch* started = nullptr;  // batch that the replica started and that has not run; null: none
    StepBatch batch = {};                // the replica's part of the joint step
    // Outcome of the joint step, until the replica's Finish.
    bool done = false;
    Status status = {};
    StepResult result = {};
  };
  void Start(size_t replica, const StepBatch& batch);
  StatusOr<StepResult> Finish(size_t replica);
  void RunJointly(size_t asking);
  Status RunOnce(StepKind kind, const std::vector<bool>& computes, Status* idle_failure);
  models::JointStep Agree(const std::vector<bool>& computes) const;
  bool survives() const { return survival_.job != nullptr; }
  bool MustRepeat(const std::vector<bool>& computes) const;
  bool FindFailed(const Status& failure);
  static Status Lost(const Replica& replica);
  bool HasFailed(size_t replica, const Status& failure) const;
  // Continues without ranks whose failure the transport knows. Steps call this; an idle job must call
  // CheckRanks().
  Status ExcludeFailed();
  Status Exclude(const std::vector<int>& ranks, const Status& failure);

  const int stages_;
  const double read_rows_;
  const Survival survival_;
  std::vector<Replica> replicas_;
  uint64_t steps_ = 0;
  uint64_t move_ = 0;  // number of the last move that was applied
  std::vector<int> excluded_;
  std::vector<std::string> failures_;
};

}  // namespace moesaic::engine
