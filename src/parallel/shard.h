// The part of a model's weights and of its KV cache that one rank has.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "parallel/layout.h"

namespace moesaic::parallel {

struct Range {
  int first = 0, count = 0;
  int end() const { return first + count; }
  bool operator==(const Range&) const = default;
};

/// Sizes of a decoder along which ranks divide it.
struct ModelShape {
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;      // 0: all heads share one latent (MLA), which every rank keeps
  int head_columns = 0;  // columns of the output projection that one head has
  int vocab = 0;
  int intermediate = 0, shared_intermediate = 0, expert_intermediate = 0;
  int experts = 0;
  std::vector<int> moe_layers = {};  // decoder layers with routed experts, ascending
  /// Number of inputs that share a scale, in the formats of attention's output projection and of the
  /// feed-forward networks' down projections. Slices of their columns begin at multiples of it.
  int attention_unit = 1, ffn_unit = 1;
};

/// Layers, heads, experts and matrix slices of one rank.
struct Shard {
  Range layers;               // decoder layers
  bool has_embedding = true;  // first stage
  bool has_head = true;       // last stage: final norm, head and MTP modules
  Range heads, kv_heads;
  Range vocab;                                                   // rows of embedding and head
  Range intermediate, shared_intermediate, expert_intermediate;  // columns; counts may be 0
  std::vector<int32_t> experts;                                  // routed experts, ascending
  /// [layers of the model] routed experts, if the layout places them by layer; empty: all layers have
  /// `experts`.
  std::vector<std::vector<int32_t>> placed_experts = {};
  /// The rank adds the biases of linears whose columns are divided. Exactly one rank of a group does.
  bool adds_bias = true;
  bool is_whole = true;  // the rank has the whole model

  /// Returns the routed experts of a decoder layer, or of an MTP module; layers of MTP modules follow.
  const std::vector<int32_t>& ExpertsOf(int layer) const {
    return layer < static_cast<int>(placed_experts.size()) ? placed_experts[layer] : experts;
  }
  bool operator==(const Shard&) const = default;
};

/// Returns the shard of a single rank, which has the whole model.
Shard WholeModel(const ModelShape& shape);

/// Returns the shard of `rank`. InvalidArgument: the layout has more stages than layers, more shards than
/// attention heads, or more parts than experts.
StatusOr<Shard> MakeShard(const Layout& layout, int rank, const ModelShape& shape);

/// Returns the experts of each rank of an expert group, ascending: [ranks]. `layer` is a decoder layer with
/// routed experts; layers from shape.layers on are those of MTP modules. `layout` must exchange tokens.
std::vector<std::vector<int>> ExpertsByRank(const Layout& layout, const ModelShape& shape, int layer);

/// Divides [0, total) into `parts` ranges that differ by at most one `unit`; their boundaries are multiples
/// of it, and ranges may be empty.
std::vector<Range> Divide(int total, int unit, int parts);

}  // namespace moesaic::parallel
