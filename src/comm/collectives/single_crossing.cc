#include "comm/collectives/single_crossing.h"

#include <algorithm>
#include <vector>

#include "comm/collectives/level_exchange.h"
#include "comm/collectives/plan_executor.h"

namespace moesaic::comm {
namespace {

std::vector<Ownership> Divisions(const std::vector<const RankTree*>& groups, int64_t offset, int64_t count) {
  std::vector<Ownership> divisions;
  for (const RankTree* group : groups) divisions.push_back(DivideForAllReduce(*group, offset, count));
  return divisions;
}

// Pieces of a group whose children are its ranks.
std::vector<LevelPiece> PiecesOf(const RankTree& group, const Ownership& owner) {
  std::vector<LevelPiece> pieces;
  for (const Piece& piece : owner) {
    const auto at = std::find(group.ranks.begin(), group.ranks.end(), piece.owner);
    pieces.push_back({piece.offset, piece.count, group.ranks, static_cast<int>(at - group.ranks.begin())});
  }
  return pieces;
}

// Calls use(offset, count, owners) for each range that has one owner in every division.
template <typename Use>
void ForEachCommonRange(const std::vector<Ownership>& divisions, int64_t offset, int64_t end,
                        const Use& use) {
  std::vector<size_t> at(divisions.size(), 0);
  std::vector<int> owners(divisions.size());
  while (offset < end) {
    int64_t next = end;
    for (size_t i = 0; i < divisions.size(); ++i) {
      while (divisions[i][at[i]].offset + divisions[i][at[i]].count <= offset) ++at[i];
      const Piece& piece = divisions[i][at[i]];
      owners[i] = piece.owner;
      next = std::min(next, piece.offset + piece.count);
    }
    use(offset, next - offset, owners);
    offset = next;
  }
}

// The receiver's sum over the owners' sums, in the order of the latter, so that all receivers round alike.
void SendAndAdd(PlanBuilder& builder, int step, int64_t offset, int64_t count, const std::vector<int>& owners,
                int receiver, const WorkBuffer& work) {
  const Slice sum = work.At(receiver, offset, count);
  const auto own = std::find(owners.begin(), owners.end(), receiver);
  // The first two terms commute. One of them, that of the receiver if it has one, is in place.
  const size_t in_place = own != owners.end() && own == owners.begin() + 1 ? 1 : 0;
  std::vector<Slice> terms(owners.size());
  for (size_t i = 0; i < owners.size(); ++i) {
    const bool is_own = owners[i] == receiver;
    // A receiver that is an owner sends its sum at the same time.
    const bool uses_output = is_own || (i == in_place && own == owners.end());
    terms[i] = uses_output ? sum : Slice{PlanBuffer::kScratch, builder.AddScratch(receiver, count), count};
    if (!is_own) builder.Send(step, owners[i], work.At(owners[i], offset, count), receiver, terms[i]);
  }
  for (size_t i = 0; i < owners.size(); ++i) {
    if (i != in_place) builder.Local(step + 1, receiver, terms[i], terms[in_place], true);
  }
  builder.Local(step + 1, receiver, terms[in_place], sum);
}

}  // namespace

void SingleCrossing(PlanBuilder& builder, const RankTree& tree, int64_t offset, int64_t count) {
  const WorkBuffer work;
  const int levels = std::max(1, Depth(tree));
  const auto border = [&](int parts) { return offset + (count * parts + levels / 2) / levels; };
  for (int depth = 1; depth <= levels; ++depth) {
    const int64_t begin = border(depth - 1), end = border(depth);
    if (begin == end) continue;
    builder.UseStream((depth - 1) % kMaxStreams);
    for (const int rank : tree.ranks) {
      builder.Local(0, rank, {PlanBuffer::kInput, begin, end - begin},
                    {PlanBuffer::kOutput, begin, end - begin});
    }
    const std::vector<const RankTree*> summed = GroupsAt(tree, depth),
                                       gathered = GroupsAt(tree, levels + 1 - depth);
    const std::vector<Ownership> of_sums = Divisions(summed, begin, end - begin),
                                 of_results = Divisions(gathered, begin, end - begin);
    for (size_t i = 0; i < summed.size(); ++i) {
      LevelReduceScatter(builder, 0, Algorithm::kLinear, static_cast<int>(summed[i]->ranks.size()),
                         PiecesOf(*summed[i], of_sums[i]), work, WireFormat::kExact);
    }
    for (const Ownership& results : of_results) {
      for (const Piece& piece : results) {
        ForEachCommonRange(of_sums, piece.offset, piece.offset + piece.count,
                           [&](int64_t at, int64_t size, const std::vector<int>& owners) {
                             SendAndAdd(builder, 1, at, size, owners, piece.owner, work);
                           });
      }
    }
    for (size_t i = 0; i < gathered.size(); ++i) {
      LevelAllGather(builder, 2, Algorithm::kLinear, static_cast<int>(gathered[i]->ranks.size()),
                     PiecesOf(*gathered[i], of_results[i]), work, WireFormat::kExact);
    }
  }
}

}  // namespace moesaic::comm
