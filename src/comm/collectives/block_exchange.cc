#include "comm/collectives/block_exchange.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace moesaic::comm {
namespace {

bool Follows(const Slice& before, const Slice& after) {
  return before.buffer == after.buffer && before.offset + before.count == after.offset;
}

// Sends blocks of one holder to `next`, and updates their place. Final blocks reach their target at the
// latest with the local steps of `step + 1`.
void MoveTogether(PlanBuilder& builder, int step, int next, std::vector<Block*> blocks) {
  std::sort(blocks.begin(), blocks.end(), [](const Block* a, const Block* b) {
    return std::tuple(a->to, a->place.buffer, a->place.offset) <
           std::tuple(b->to, b->place.buffer, b->place.offset);
  });
  const int holder = blocks.front()->holder;
  int64_t count = 0;
  bool together = true, targets_together = true;
  for (size_t i = 0; i < blocks.size(); ++i) {
    count += blocks[i]->place.count;
    if (i > 0 && !Follows(blocks[i - 1]->place, blocks[i]->place)) together = false;
    if (blocks[i]->to != next) targets_together = false;
    if (i > 0 && !Follows(blocks[i - 1]->target, blocks[i]->target)) targets_together = false;
  }
  Slice source = {blocks.front()->place.buffer, blocks.front()->place.offset, count};
  if (!together) {
    source = {PlanBuffer::kScratch, builder.AddScratch(holder, count), count};
    int64_t at = source.offset;
    for (const Block* block : blocks) {
      builder.Local(step, holder, block->place, {PlanBuffer::kScratch, at, block->place.count});
      at += block->place.count;
    }
  }
  Slice received = {blocks.front()->target.buffer, blocks.front()->target.offset, count};
  if (!targets_together) received = {PlanBuffer::kScratch, builder.AddScratch(next, count), count};
  builder.Send(step, holder, source, next, received);
  int64_t at = received.offset;
  for (Block* block : blocks) {
    block->holder = next;
    block->place = {received.buffer, at, block->place.count};
    at += block->place.count;
    if (targets_together || block->to != next) continue;
    builder.Local(step + 1, next, block->place, block->target);
    block->place = block->target;
  }
}

// Groups blocks by (holder, next rank) and moves each group: as one message if its blocks are small.
void MoveStep(PlanBuilder& builder, int step, const std::vector<std::pair<Block*, int>>& moves) {
  std::map<std::pair<int, int>, std::vector<Block*>> groups;
  for (const auto& [block, next] : moves) groups[{block->holder, next}].push_back(block);
  for (auto& [ranks, blocks] : groups) {
    int64_t count = 0;
    for (const Block* block : blocks) count += block->place.count;
    if (count * builder.request().element_bytes < kPackBytes * static_cast<int64_t>(blocks.size())) {
      MoveTogether(builder, step, ranks.second, blocks);
    } else {
      for (Block* block : blocks) MoveTogether(builder, step, ranks.second, {block});
    }
  }
}

// Child and index in it of each rank of a tree.
struct Position {
  int child = -1, index = -1;
};
std::vector<Position> PositionsIn(const RankTree& tree, int ranks) {
  std::vector<Position> positions(ranks);
  for (int child = 0; child < static_cast<int>(tree.children.size()); ++child) {
    const std::vector<int>& members = tree.children[child].ranks;
    for (int i = 0; i < static_cast<int>(members.size()); ++i) positions[members[i]] = {child, i};
  }
  return positions;
}

// Rank of a child of `size` ranks, by index, that receives blocks of sender `index` of `senders` for receiver
// `to`.
int PeerIndex(int index, int senders, int to, int size) {
  if (size <= senders) return index * size / senders;
  // Several peers belong to this sender: those p with p * senders / size == index. The receiver itself is
  // preferred.
  const int first = (index * size + senders - 1) / senders;
  const int end = ((index + 1) * size + senders - 1) / senders;
  return to >= first && to < end ? to : first + to % (end - first);
}

int MoveDown(PlanBuilder& builder, int step, const RankTree& tree, const std::vector<Block*>& blocks,
             Algorithm algorithm) {
  if (tree.children.empty() || blocks.empty()) return step;
  const std::vector<Position> positions = PositionsIn(tree, builder.request().ranks);
  const int children = static_cast<int>(tree.children.size());
  std::vector<std::vector<std::pair<Block*, int>>> by_distance(children);
  for (Block* block : blocks) {
    const Position from = positions[block->holder], to = positions[block->to];
    if (from.child == to.child) continue;
    const std::vector<int>& peers = tree.children[to.child].ranks;
    const int senders = static_cast<int>(tree.children[from.child].ranks.size());
    const int peer = peers[PeerIndex(from.index, senders, to.index, static_cast<int>(peers.size()))];
    const int distance = algorithm == Algorithm::kLinear ? 1 : (to.child - from.child + children) % children;
    by_distance[distance].emplace_back(block, peer);
  }
  for (int distance = 1; distance < children; ++distance) {
    if (by_distance[distance].empty()) continue;
    MoveStep(builder, step++, by_distance[distance]);
  }
  std::vector<std::vector<Block*>> inside(children);
  for (Block* block : blocks) {
    if (block->holder != block->to) inside[positions[block->to].child].push_back(block);
  }
  int end = step;
  for (int child = 0; child < children; ++child) {
    end = std::max(end, MoveDown(builder, step, tree.children[child], inside[child], algorithm));
  }
  return end;
}

// A block moves by the powers of two of its distance, so each rank sends one message per step.
int MoveBruck(PlanBuilder& builder, int step, const RankTree& tree, std::vector<Block>& blocks) {
  const int ranks = static_cast<int>(tree.ranks.size());
  std::vector<int> index_of(builder.request().ranks, 0);
  for (int i = 0; i < ranks; ++i) index_of[tree.ranks[i]] = i;
  for (int distance = 1; distance < ranks; distance *= 2) {
    std::map<std::pair<int, int>, std::vector<Block*>> groups;
    for (Block& block : blocks) {
      const int left = (index_of[block.to] - index_of[block.holder] + ranks) % ranks;
      if ((left & distance) == 0) continue;
      groups[{block.holder, tree.ranks[(index_of[block.holder] + distance) % ranks]}].push_back(&block);
    }
    for (auto& [pair, group] : groups) MoveTogether(builder, step, pair.second, group);
    ++step;
  }
  return step;
}

}  // namespace

int MoveBlocks(PlanBuilder& builder, int step, const RankTree& tree, std::vector<Block> blocks,
               Algorithm algorithm) {
  std::erase_if(blocks, [](const Block& block) { return block.place.count == 0; });
  std::vector<Block*> moving;
  for (Block& block : blocks) {
    if (block.holder == block.to) {
      builder.Local(step, block.to, block.place, block.target);
      block.place = block.target;
    } else {
      moving.push_back(&block);
    }
  }
  if (tree.children.empty()) return step + 1;
  if (algorithm == Algorithm::kBruck) {
    std::erase_if(blocks, [](const Block& block) { return block.holder == block.to; });
    return MoveBruck(builder, step, tree, blocks) + 1;
  }
  return MoveDown(builder, step, tree, moving, algorithm) + 1;
}

}  // namespace moesaic::comm
