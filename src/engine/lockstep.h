// Joint steps of replicas that divide the experts: when one of them computes rows, all take part in the
// exchanges of every layer with experts. docs/contracts/executors.md, X27 to X33, is normative.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/executor.h"

namespace moesaic::engine {

/// Collects the batches that replicas start, and runs them as one joint step when the first is waited for.
/// Replicas without rows run an empty batch. Nothing runs while no replica has rows. One thread.
class Lockstep {
 public:
  /// `stages` of each replica's pipeline, which divides batches with `read_rows` (SplitForPipeline).
  explicit Lockstep(int stages, double read_rows = 1) : stages_(stages), read_rows_(read_rows) {}

  /// Adds the next replica, the one of this process first, and returns the executor for its engine. All
  /// executors end before any of them is used again.
  static std::unique_ptr<Executor> Add(const std::shared_ptr<Lockstep>& lockstep,
                                       std::unique_ptr<Executor> replica);

  /// The next joint step begins with this move of experts, which all ranks have reported as ready.
  void ApplyMove(uint64_t number) { move_ = number; }
  uint64_t steps() const { return steps_; }  ///< Joint steps so far.

 private:
  class Member;
  struct Replica {
    Executor* executor = nullptr;
    const StepBatch* started = nullptr;  // that has not run
    StepBatch batch = {};                // of the joint step
    // Outcome of the joint step, until the replica's Finish.
    bool done = false;
    Status status = {};
    StepResult result = {};
  };
  void Start(size_t replica, const StepBatch& batch);
  StatusOr<StepResult> Finish(size_t replica);
  void RunJointly(size_t asking);
  models::JointStep Agree(const std::vector<bool>& computes) const;

  const int stages_;
  const double read_rows_;
  std::vector<Replica> replicas_;
  uint64_t steps_ = 0;
  uint64_t move_ = 0;  // last one that is applied
};

}  // namespace moesaic::engine
