// Experts of a rank's layers that can move to other ranks while the model serves.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "layers/moe.h"
#include "models/model.h"
#include "parallel/expert_group.h"
#include "parallel/expert_move.h"
#include "runtime/memory.h"

namespace moesaic::models {

/// One move at a time: the weights of one layer's next placement are gathered in a second buffer, while the
/// rank computes with the first. One thread.
class MovableExperts {
 public:
  struct Layer {
    int number = 0;                   // decoder layer
    layers::MoeLayer* moe = nullptr;  // borrowed
    std::function<void()> release;    // returns the memory in which the layer was loaded to the system
  };
  /// `layers` are those of the rank with routed experts, in the order of `group`. All are borrowed.
  MovableExperts(std::vector<Layer> layers, parallel::ExpertGroup& group);

  /// Begins to gather the experts of a layer. A layer of another stage is ready at once. An error is kept,
  /// too: the move has failed. Unimplemented: weights with static activation scales, or one image per NUMA
  /// node.
  Status Begin(const ExpertMoveOrder& order);
  /// Does a small part of the move; does not wait. The report counts the time of calls in steps.
  ExpertMoveReport Advance(bool in_step);
  /// The next layer computation uses the gathered experts. FailedPrecondition: the move `number` is not
  /// ready.
  Status Apply(uint64_t number);
  /// Gives the move up in any state.
  void Drop();

 private:
  struct Move {
    ExpertMoveReport report;
    size_t layer = 0;
    bool elsewhere = false;  // the layer is one of another stage
    parallel::LayerPlacement next;
    std::vector<double> loads, speeds;
    runtime::Buffer weights;
    std::optional<parallel::ExpertMove> transfers;
  };
  Status Start(const ExpertMoveOrder& order, Move& move);
  void Fail(const Status& why);

  const std::vector<Layer> layers_;
  parallel::ExpertGroup& group_;
  std::vector<kernels::ExpertWeights> loaded_;  // [layers] as the model was loaded
  std::vector<runtime::Buffer> weights_;        // [layers]; empty: the memory in which the layer was loaded
  std::unique_ptr<Move> move_;
};

}  // namespace moesaic::models
