// Assembles plans from messages that are placed in global steps. A message of step t waits only for messages
// of earlier steps, so plans that are built here cannot deadlock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/collectives/plan.h"

namespace moesaic::comm {

class PlanBuilder {
 public:
  PlanBuilder(PlanRequest request, std::string algorithm);

  const PlanRequest& request() const { return plan_.request; }
  /// Chooses the stream of the calls that follow; 0 at the start.
  void UseStream(int stream) { stream_ = stream; }
  /// Returns the offset of new scratch elements of a rank.
  int64_t AddScratch(int rank, int64_t count);

  /// Adds a message. A message to the sender itself becomes a local step. Messages of no elements are
  /// dropped.
  void Send(int step, int from, const Slice& source, int to, const Slice& target, bool reduce = false,
            WireFormat wire = WireFormat::kExact);
  /// Adds a message of no elements.
  void SendEmpty(int step, int from, int to);
  /// Adds a local step. Local steps of a step precede its messages and keep the order of these calls.
  void Local(int step, int rank, const Slice& source, const Slice& target, bool reduce = false,
             WireFormat wire = WireFormat::kExact);

  /// Returns the plan. Steps in which a rank is idle are dropped, and copies of the input by ElideCopies().
  Plan Build() &&;

 private:
  Round& At(int rank, int step);

  Plan plan_;
  int stream_ = 0;
};

}  // namespace moesaic::comm
