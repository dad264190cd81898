// Exchange of blocks that each have one sender and one receiver: AllToAll, AllToAllv, and the gathering of
// all contributions by their owner in reductions of fixed order.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/collectives/plan_builder.h"
#include "comm/collectives/plan_factory.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

struct Block {
  int to = 0;      // final receiver
  int holder = 0;  // rank that has it now
  Slice place;     // in the holder's buffers
  Slice target;    // in the receiver's buffers
};

/// Moves all blocks to their targets, from `step` on. Returns a step after which they are complete. Blocks
/// that cross the top of the tree are sent together to one peer in the other child, which sends them down.
/// The peer has the index of the sender, so all ranks of a child share the load. Blocks of less than
/// kPackBytes are packed into one message. Algorithms: kPairwise and kLinear at the topmost level; kBruck in
/// flat trees.
int MoveBlocks(PlanBuilder& builder, int step, const RankTree& tree, std::vector<Block> blocks,
               Algorithm algorithm);

/// Minimum bytes of a block that gets a message of its own. To copy a larger block costs more than a message.
inline constexpr int64_t kPackBytes = 32 << 10;

}  // namespace moesaic::comm
