// Exchanges among the children of one level of a rank tree. All reductions and gathers consist of them. For
// each piece, one rank of each child takes part: its handler. A flat algorithm has one rank per child.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/collectives/plan_builder.h"
#include "comm/collectives/plan_factory.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

/// Place of the vector in each rank's buffers: element x is element base[rank] + x.
struct WorkBuffer {
  PlanBuffer buffer = PlanBuffer::kOutput;
  std::vector<int64_t> base;  // [ranks]; empty: 0 everywhere

  Slice At(int rank, int64_t offset, int64_t count) const {
    return {buffer, offset + (base.empty() ? 0 : base[rank]), count};
  }
};

/// Each function adds messages from `step` on and returns the step after the last message.

/// Gives the owner of each piece its sum over all handlers.
int LevelReduceScatter(PlanBuilder& builder, int step, Algorithm algorithm, int children,
                       const std::vector<LevelPiece>& pieces, const WorkBuffer& work, WireFormat wire);
/// Gives all handlers of a piece its owner's contents.
int LevelAllGather(PlanBuilder& builder, int step, Algorithm algorithm, int children,
                   const std::vector<LevelPiece>& pieces, const WorkBuffer& work, WireFormat wire);
/// Gives all handlers of a piece its sum, by recursive doubling. Needs scratch of the size of the pieces.
int LevelDoubling(PlanBuilder& builder, int step, int children, const std::vector<LevelPiece>& pieces,
                  const WorkBuffer& work);
/// Gives all handlers of a piece its sum in one step: handlers send their terms to each other, and add them
/// in the order of children. Needs scratch of children - 1 times the size of the pieces.
int LevelDirect(PlanBuilder& builder, int step, int children, const std::vector<LevelPiece>& pieces,
                const WorkBuffer& work);

/// Gives all handlers of a piece its owner's contents. They are sent whole, along a chain (kChain) or down a
/// binomial tree (kBinomial).
int LevelBroadcast(PlanBuilder& builder, int step, Algorithm algorithm, int children,
                   const std::vector<LevelPiece>& pieces, const WorkBuffer& work);

}  // namespace moesaic::comm
