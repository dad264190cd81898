#include "comm/collectives/plan_factory.h"

#include <algorithm>
#include <array>

#include "comm/collectives/block_exchange.h"
#include "comm/collectives/plan_builder.h"
#include "comm/collectives/single_crossing.h"
#include "comm/collectives/tree_exchange.h"

namespace moesaic::comm {
namespace {

Ownership OwnershipOf(const std::vector<int64_t>& counts) {
  Ownership owner;
  int64_t offset = 0;
  for (int rank = 0; rank < static_cast<int>(counts.size()); ++rank) {
    if (counts[rank] > 0) owner.push_back({offset, counts[rank], rank});
    offset += counts[rank];
  }
  return owner;
}

std::vector<int64_t> OffsetsOf(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t count : counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

class Factory {
 public:
  Factory(const PlanRequest& request, const RankTree& tree, const PlanShape& shape, std::string name)
      : request_(request), tree_(tree), shape_(shape), builder_(request, std::move(name)) {}

  Plan Build() && {
    if (request_.collective == Collective::kBarrier) {
      TreeBarrier(builder_, 0, tree_);
      return std::move(builder_).Build();
    }
    for (int segment = 0; segment < shape_.segments; ++segment) {
      builder_.UseStream(segment % shape_.streams);
      Add(segment, segment / shape_.streams);
    }
    return std::move(builder_).Build();
  }

 private:
  void Add(int segment, int step) {
    switch (request_.collective) {
      case Collective::kBroadcast:
        return AddBroadcast(segment, step);
      case Collective::kAllReduce:
        return AddAllReduce(segment, step);
      case Collective::kReduceScatter:
        return AddReduceScatter(segment, step);
      case Collective::kAllGather:
        return AddAllGather(segment, step);
      case Collective::kAllToAll:
      case Collective::kAllToAllv:
        return AddAllToAll(segment, step);
      case Collective::kBarrier:
        return;
    }
  }

  // Streams share ports fairly, so equal segments would end each phase together and leave the ports idle for
  // the latency of the next one. If the first segments of the streams grow, their phases end one after the
  // other.
  Ownership SegmentOf(const Ownership& whole, int segment) const {
    return Segment(whole, segment, shape_.segments, /*largest=*/shape_.streams);
  }

  // The segment of the range [0, request.count).
  Piece Range(int segment) const {
    const Ownership part = SegmentOf({{0, request_.count, 0}}, segment);
    return part.empty() ? Piece{} : part.front();
  }

  void AddBroadcast(int segment, int step) {
    const Piece range = Range(segment);
    builder_.Local(step, request_.root, {PlanBuffer::kInput, range.offset, range.count},
                   {PlanBuffer::kOutput, range.offset, range.count});
    TreeBroadcast(builder_, step, tree_, request_.root, range.offset, range.count, {}, shape_);
  }

  void AddAllReduce(int segment, int step) {
    const Piece range = Range(segment);
    const bool is_flat = shape_.fixed_order || Depth(tree_) <= 1;
    if (shape_.top == Algorithm::kDirect && is_flat) return AddDirect(range, step);
    if (shape_.fixed_order) {
      const Ownership owner = DivideForAllReduce(tree_, range.offset, range.count);
      std::vector<int64_t> of_output(request_.ranks, 0);
      step = ReduceInOrder(step, owner, of_output);
      TreeAllGather(builder_, step, tree_, owner, {}, shape_);
      return;
    }
    if (shape_.top == Algorithm::kSingleCrossing) {
      SingleCrossing(builder_, tree_, range.offset, range.count);
      return;
    }
    for (int rank = 0; rank < request_.ranks; ++rank) {
      builder_.Local(step, rank, {PlanBuffer::kInput, range.offset, range.count},
                     {PlanBuffer::kOutput, range.offset, range.count});
    }
    TreeAllReduce(builder_, step, tree_, range.offset, range.count, {}, shape_);
  }

  void AddDirect(const Piece& range, int step) {
    const Slice input = {PlanBuffer::kInput, range.offset, range.count};
    const Slice output = {PlanBuffer::kOutput, range.offset, range.count};
    // Each rank adds its own term last, which saves a copy. Operations are commutative, but a fixed order
    // covers the payloads of NaNs, too.
    if (request_.ranks == 2 && !shape_.fixed_order) {
      for (int rank = 0; rank < 2; ++rank) {
        builder_.Local(step, rank, input, output);
        builder_.Send(step, rank, input, 1 - rank, output, true);
      }
      return;
    }
    for (int to = 0; to < request_.ranks; ++to) {
      for (int from = 0; from < request_.ranks; ++from) {
        Slice source = input;
        if (from != to && from > 0) {
          source = {PlanBuffer::kScratch, builder_.AddScratch(to, range.count), range.count};
        } else if (from != to) {
          source = output;  // the first term is received in place
        }
        if (from != to) builder_.Send(step, from, input, to, source);
        if (source.buffer != PlanBuffer::kOutput) builder_.Local(step + 1, to, source, output, from > 0);
      }
    }
  }

  // Owners gather all contributions in scratch and add them in the order of ranks. Their sums are output
  // elements, at the position in the vector minus `base[owner]`. Returns the step in which the sums are
  // complete.
  int ReduceInOrder(int step, const Ownership& owner, const std::vector<int64_t>& base) {
    std::vector<Block> blocks;
    struct Sum {
      int rank;
      Slice source, target;
      bool reduce;
    };
    std::vector<Sum> sums;
    for (const Piece& piece : owner) {
      const Slice input = {PlanBuffer::kInput, piece.offset, piece.count};
      const Slice output = {PlanBuffer::kOutput, piece.offset - base[piece.owner], piece.count};
      for (int from = 0; from < request_.ranks; ++from) {
        Slice source = input;
        if (from != piece.owner) {
          source = {PlanBuffer::kScratch, builder_.AddScratch(piece.owner, piece.count), piece.count};
          blocks.push_back({piece.owner, from, input, source});
        }
        sums.push_back({piece.owner, source, output, from > 0});
      }
    }
    const bool at_once = shape_.top == Algorithm::kLinear;
    step = MoveBlocks(builder_, step, tree_, std::move(blocks),
                      at_once ? Algorithm::kLinear : Algorithm::kPairwise);
    for (const Sum& sum : sums) builder_.Local(step, sum.rank, sum.source, sum.target, sum.reduce);
    return step;
  }

  void AddReduceScatter(int segment, int step) {
    const Ownership owner = SegmentOf(OwnershipOf(request_.counts), segment);
    std::vector<int64_t> first = OffsetsOf(request_.counts);  // vector position of output element 0, by rank
    if (shape_.fixed_order) {
      ReduceInOrder(step, owner, first);
      return;
    }
    if (owner.empty()) return;
    if (scratch_.empty()) {
      for (int rank = 0; rank < request_.ranks; ++rank) {
        scratch_.push_back(builder_.AddScratch(rank, first.back()));
      }
    }
    const WorkBuffer work = {PlanBuffer::kScratch, scratch_};
    for (int rank = 0; rank < request_.ranks; ++rank) {
      for (const Piece& piece : owner) {
        builder_.Local(step, rank, {PlanBuffer::kInput, piece.offset, piece.count},
                       work.At(rank, piece.offset, piece.count));
      }
    }
    step = TreeReduceScatter(builder_, step, tree_, owner, work, shape_);
    for (const Piece& piece : owner) {
      builder_.Local(step, piece.owner, work.At(piece.owner, piece.offset, piece.count),
                     {PlanBuffer::kOutput, piece.offset - first[piece.owner], piece.count});
    }
  }

  void AddAllGather(int segment, int step) {
    const Ownership owner = SegmentOf(OwnershipOf(request_.counts), segment);
    const std::vector<int64_t> first = OffsetsOf(request_.counts);
    for (const Piece& piece : owner) {
      builder_.Local(step, piece.owner, {PlanBuffer::kInput, piece.offset - first[piece.owner], piece.count},
                     {PlanBuffer::kOutput, piece.offset, piece.count});
    }
    TreeAllGather(builder_, step, tree_, owner, {}, shape_);
  }

  void AddAllToAll(int segment, int step) {
    const auto ranks = static_cast<size_t>(request_.ranks);
    const auto count = [&](size_t from, size_t to) {
      return request_.collective == Collective::kAllToAll ? request_.count
                                                          : request_.matrix[from * ranks + to];
    };
    std::vector<int64_t> received(ranks, 0);  // elements of the output that precede the block, by receiver
    std::vector<Block> blocks;
    for (size_t from = 0; from < ranks; ++from) {
      int64_t sent = 0;
      for (size_t to = 0; to < ranks; ++to) {
        for (const Piece& part : SegmentOf({{0, count(from, to), 0}}, segment)) {
          blocks.push_back({static_cast<int>(to),
                            static_cast<int>(from),
                            {PlanBuffer::kInput, sent + part.offset, part.count},
                            {PlanBuffer::kOutput, received[to] + part.offset, part.count}});
        }
        sent += count(from, to);
        received[to] += count(from, to);
      }
    }
    MoveBlocks(builder_, step, tree_, std::move(blocks), shape_.top);
  }

  const PlanRequest& request_;
  const RankTree& tree_;
  const PlanShape& shape_;
  PlanBuilder builder_;
  std::vector<int64_t> scratch_;  // ReduceScatter: place of the vector in each rank's scratch
};

std::string Describe(const RankTree& tree, const PlanShape& shape) {
  const int depth = Depth(tree);
  if (shape.top == Algorithm::kSingleCrossing && !shape.fixed_order) {
    return fmt::format("single crossing of {} levels", depth);
  }
  std::string name = depth > 1 ? fmt::format("hierarchical (top: {}, {} inner levels: {})", Name(shape.top),
                                             depth - 1, Name(shape.inner))
                               : std::string(Name(shape.top));
  if (shape.fixed_order) name += ", fixed order";
  if (shape.segments > 1) name += fmt::format(", {} segments", shape.segments);
  if (shape.streams > 1) name += fmt::format(", {} streams", shape.streams);
  if (shape.wire != WireFormat::kExact) {
    name += fmt::format(", {} between {}", Name(shape.wire), depth > 1 ? "groups" : "ranks");
  }
  return name;
}

Status ValidateShape(const PlanRequest& request, const RankTree& tree, const PlanShape& shape) {
  std::vector<int> ranks = tree.ranks;
  std::sort(ranks.begin(), ranks.end());
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != static_cast<int>(i)) return InvalidArgument("plan: the tree lacks or repeats rank {}", i);
  }
  if (static_cast<int>(ranks.size()) != request.ranks) {
    return InvalidArgument("plan: the tree must have the {} ranks of the request; found {}", request.ranks,
                           ranks.size());
  }
  if (!Supports(request.collective, shape.top)) {
    return InvalidArgument("plan: {} has no algorithm {}", Name(request.collective), Name(shape.top));
  }
  if (shape.segments < 1 || shape.streams < 1 || shape.streams > shape.segments) {
    return InvalidArgument("plan: expected 1 <= streams <= segments; found {} streams and {} segments",
                           shape.streams, shape.segments);
  }
  const bool all_to_all =
      request.collective == Collective::kAllToAll || request.collective == Collective::kAllToAllv;
  if (all_to_all && shape.top == Algorithm::kBruck && Depth(tree) > 1) {
    return InvalidArgument("plan: bruck needs a flat tree; found {} levels", Depth(tree));
  }
  if (shape.top == Algorithm::kSingleCrossing && shape.segments > 1) {
    return InvalidArgument("plan: {} divides the vector itself; found {} segments", Name(shape.top),
                           shape.segments);
  }
  if (shape.wire == WireFormat::kExact) return OkStatus();
  const bool reduces =
      request.collective == Collective::kAllReduce || request.collective == Collective::kReduceScatter;
  if (!reduces || shape.fixed_order || shape.top != Algorithm::kPairwise) {
    return InvalidArgument(
        "plan: lossy encodings need a pairwise reduction without fixed order; found {}, {}",
        Name(request.collective), Name(shape.top));
  }
  return OkStatus();
}

}  // namespace

std::string_view Name(Algorithm algorithm) {
  static constexpr std::array<std::string_view, 12> kNames = {
      "ring",   "pairwise",        "halving",  "bruck", "doubling",       "direct",
      "linear", "single crossing", "binomial", "chain", "scatter-gather", "dissemination"};
  return kNames[static_cast<size_t>(algorithm)];
}

bool Supports(Collective collective, Algorithm algorithm) {
  using enum Algorithm;
  const auto one_of = [&](std::initializer_list<Algorithm> list) {
    return std::find(list.begin(), list.end(), algorithm) != list.end();
  };
  switch (collective) {
    case Collective::kBroadcast:
      return one_of({kBinomial, kChain, kScatterGather});
    case Collective::kAllReduce:
      return one_of({kRing, kPairwise, kHalving, kDoubling, kDirect, kLinear, kSingleCrossing});
    case Collective::kReduceScatter:
      return one_of({kRing, kPairwise, kHalving, kLinear});
    case Collective::kAllGather:
      return one_of({kRing, kPairwise, kHalving, kBruck, kLinear});
    case Collective::kAllToAll:
    case Collective::kAllToAllv:
      return one_of({kPairwise, kBruck, kLinear});
    case Collective::kBarrier:
      return one_of({kDissemination});
  }
  return false;
}

StatusOr<Plan> BuildPlan(const PlanRequest& request, const RankTree& tree, const PlanShape& shape) {
  RETURN_IF_ERROR(ValidateRequest(request));
  RETURN_IF_ERROR(ValidateShape(request, tree, shape));
  return Factory(request, tree, shape, Describe(tree, shape)).Build();
}

}  // namespace moesaic::comm
