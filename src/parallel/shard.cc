#include "parallel/shard.h"

#include <algorithm>
#include <numeric>

#include "base/round.h"

namespace moesaic::parallel {
namespace {

// Prefers slices of whole 64-column units, which are packed without padding, if every part gets one.
int PreferredUnit(int total, int unit, int parts) {
  constexpr int kPackedColumns = 64;
  const int wide = std::lcm(unit, kPackedColumns);
  return total >= wide * parts ? wide : unit;
}

Range Columns(int total, int unit, int parts, int part) {
  return Divide(total, PreferredUnit(total, unit, parts), parts)[part];
}

// Number of heads, a multiple of `step`, whose columns are a multiple of the unit.
int HeadUnit(const ModelShape& shape, int step) {
  return std::lcm(step * shape.head_columns, shape.attention_unit) / shape.head_columns;
}

Status TooManyShards(const ModelShape& shape, int shards, int units, int unit) {
  if (unit == 1) {
    return InvalidArgument("{} attention heads can't be divided among {} tensor parallel ranks", shape.heads,
                           shards);
  }
  return InvalidArgument(
      "{} attention heads can't be divided among {} tensor parallel ranks: {} of them stay together, so at "
      "most {} ranks fit",
      shape.heads, shards, unit, units);
}

Status DivideHeads(const ModelShape& shape, int shards, int shard, Shard* out) {
  if (shape.kv_heads == 0) {
    const int unit = HeadUnit(shape, 1);
    const int units = base::CeilDiv(shape.heads, unit);
    if (units < shards) return TooManyShards(shape, shards, units, unit);
    out->heads = Divide(shape.heads, unit, shards)[shard];
    return OkStatus();
  }
  const int group = shape.heads / shape.kv_heads;
  if (shards <= shape.kv_heads) {
    const int unit = HeadUnit(shape, group) / group;  // in KV heads
    const int units = base::CeilDiv(shape.kv_heads, unit);
    if (units < shards) return TooManyShards(shape, shards, units, unit * group);
    out->kv_heads = Divide(shape.kv_heads, unit, shards)[shard];
    out->heads = {out->kv_heads.first * group, out->kv_heads.count * group};
    return OkStatus();
  }
  // Several ranks have a copy of one KV head and divide its query heads.
  const auto first_of = [&](int kv_head) { return base::CeilDiv(kv_head * shards, shape.kv_heads); };
  const int kv_head = static_cast<int>(int64_t{shard} * shape.kv_heads / shards);
  const int sharers = first_of(kv_head + 1) - first_of(kv_head);
  const int unit = HeadUnit(shape, 1);
  const int units = base::CeilDiv(group, unit);
  // Every rank returns the same error, even if its own head has fewer sharers than others.
  const bool fits = units >= base::CeilDiv(shards, shape.kv_heads) && group % std::min(unit, group) == 0;
  if (!fits) return TooManyShards(shape, shards, shape.kv_heads * units, std::min(unit, group));
  const Range part = Divide(group, unit, sharers)[shard - first_of(kv_head)];
  out->kv_heads = {kv_head, 1};
  out->heads = {kv_head * group + part.first, part.count};
  return OkStatus();
}

// Index of a decoder layer in the placement, whose layers are those with experts, or all; -1: none.
int PlacedLayer(const Placement& placement, const ModelShape& shape, int layer) {
  if (layer >= shape.layers) return -1;  // MTP
  const auto found = std::ranges::find(shape.moe_layers, layer);
  if (found == shape.moe_layers.end()) return -1;
  const bool only_moe = placement.layers.size() == shape.moe_layers.size();
  return only_moe ? static_cast<int>(found - shape.moe_layers.begin()) : layer;
}

Status CheckFits(const Placement& placement, const ModelShape& shape) {
  if (placement.experts != shape.experts) {
    return InvalidArgument("the expert placement has {} experts in a layer, but the model has {}",
                           placement.experts, shape.experts);
  }
  const size_t layers = placement.layers.size();
  if (layers == shape.moe_layers.size() || layers == static_cast<size_t>(shape.layers)) return OkStatus();
  return InvalidArgument(
      "the expert placement must have the model's {} layers with routed experts, or all its {} layers; found "
      "{}",
      shape.moe_layers.size(), shape.layers, layers);
}

// The experts of `rank` in each layer of the model.
std::vector<std::vector<int32_t>> PlacedExperts(const Layout& layout, const ModelShape& shape, int rank) {
  std::vector<std::vector<int32_t>> placed(shape.layers);
  for (const int layer : shape.moe_layers) {
    const std::vector<int> own = ExpertsByRank(layout, shape, layer)[layout.IndexInExpertGroup(rank)];
    placed[layer].assign(own.begin(), own.end());
  }
  return placed;
}

// Part `part` of `total`, divided by `counts`, or into equal parts.
StatusOr<Range> PartOf(const char* what, const std::vector<int>& counts, int total, int parts, int part) {
  if (counts.empty()) return Divide(total, 1, parts)[part];
  const int sum = std::accumulate(counts.begin(), counts.end(), 0);
  if (sum != total) {
    return InvalidArgument("the model has {} {}, but the layout divides {}", total, what, sum);
  }
  return Range{std::accumulate(counts.begin(), counts.begin() + part, 0), counts[part]};
}

}  // namespace

std::vector<std::vector<int>> ExpertsByRank(const Layout& layout, const ModelShape& shape, int layer) {
  const int ranks = layout.degrees().tensor * layout.degrees().data;
  const Placement* placement = layout.placement();
  const int index = placement == nullptr ? -1 : PlacedLayer(*placement, shape, layer);
  std::vector<std::vector<int>> by_rank(ranks);
  if (index >= 0) {
    by_rank = placement->layers[index];
    for (std::vector<int>& experts : by_rank) {
      std::ranges::sort(experts);
      experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
    }
    return by_rank;
  }
  const std::vector<int>& counts = layout.split().experts;
  const std::vector<Range> even = Divide(shape.experts, 1, ranks);
  for (int rank = 0, first = 0; rank < ranks; ++rank) {
    by_rank[rank].resize(counts.empty() ? even[rank].count : counts[rank]);
    std::iota(by_rank[rank].begin(), by_rank[rank].end(), first);
    first += static_cast<int>(by_rank[rank].size());
  }
  return by_rank;
}

std::vector<Range> Divide(int total, int unit, int parts) {
  // Integers: the first units % parts ranges have one unit more.
  const int units = base::CeilDiv(total, unit);
  std::vector<Range> ranges;
  int first = 0;
  for (int part = 0; part < parts; ++part) {
    const int end = std::min(total, first + unit * (units / parts + (part < units % parts ? 1 : 0)));
    ranges.push_back({first, end - first});
    first = end;
  }
  return ranges;
}

Shard WholeModel(const ModelShape& shape) {
  Shard whole{.layers = {0, shape.layers},
              .heads = {0, shape.heads},
              .kv_heads = {0, shape.kv_heads},
              .vocab = {0, shape.vocab},
              .intermediate = {0, shape.intermediate},
              .shared_intermediate = {0, shape.shared_intermediate},
              .expert_intermediate = {0, shape.expert_intermediate},
              .experts = std::vector<int32_t>(shape.experts)};
  std::iota(whole.experts.begin(), whole.experts.end(), 0);
  return whole;
}

StatusOr<Shard> MakeShard(const Layout& layout, int rank, const ModelShape& shape) {
  const Degrees& degrees = layout.degrees();
  if (rank < 0 || rank >= layout.ranks()) {
    return InvalidArgument("the layout {} has {} ranks, found rank {}", Name(degrees), layout.ranks(), rank);
  }
  Shard shard = WholeModel(shape);
  if (layout.ranks() == 1) return shard;
  const Coordinates at = layout.At(rank);
  if (degrees.pipeline > shape.layers) {
    return InvalidArgument("{} layers can't be divided among {} pipeline stages", shape.layers,
                           degrees.pipeline);
  }
  ASSIGN_OR_RETURN(shard.layers,
                   PartOf("layers", layout.split().layers, shape.layers, degrees.pipeline, at.stage));
  shard.has_embedding = at.stage == 0;
  shard.has_head = at.stage == degrees.pipeline - 1;
  RETURN_IF_ERROR(DivideHeads(shape, degrees.tensor, at.shard, &shard));
  if (degrees.tensor > shape.vocab) {
    return InvalidArgument("a vocabulary of {} tokens can't be divided among {} tensor parallel ranks",
                           shape.vocab, degrees.tensor);
  }
  shard.vocab = Columns(shape.vocab, 1, degrees.tensor, at.shard);
  const int unit = shape.ffn_unit;
  shard.intermediate = Columns(shape.intermediate, unit, degrees.tensor, at.shard);
  shard.shared_intermediate = Columns(shape.shared_intermediate, unit, degrees.tensor, at.shard);
  shard.expert_intermediate =
      Columns(shape.expert_intermediate, unit, layout.expert_slices(), layout.ExpertSlice(rank));
  if (shape.experts > 0 && degrees.expert > shape.experts) {
    return InvalidArgument("{} routed experts can't be divided among {} expert parallel ranks", shape.experts,
                           degrees.expert);
  }
  ASSIGN_OR_RETURN(const Range experts, PartOf("routed experts", layout.split().experts, shape.experts,
                                               degrees.expert, layout.ExpertPart(rank)));
  shard.experts.resize(experts.count);
  std::iota(shard.experts.begin(), shard.experts.end(), experts.first);
  if (layout.placement() != nullptr) {
    RETURN_IF_ERROR(CheckFits(*layout.placement(), shape));
    shard.placed_experts = PlacedExperts(layout, shape, rank);
  }
  shard.adds_bias = at.shard == 0;
  shard.is_whole = shard == WholeModel(shape);
  return shard;
}

}  // namespace moesaic::parallel
