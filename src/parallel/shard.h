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

/// Sizes of a decoder that can be divided.
struct ModelShape {
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;      // 0: all heads share one latent (MLA), which every rank keeps
  int head_columns = 0;  // columns of the output projection that one head has
  int vocab = 0;
  int intermediate = 0, shared_intermediate = 0, expert_intermediate = 0;
  int experts = 0;
  std::vector<int> moe_layers = {};  // decoder layers with routed experts, ascending
  /// Inputs that share a scale, in the formats of attention's output projection and of the feed-forward
  /// networks' down projections. Slices of their columns begin at multiples.
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
  /// [layers of the model] the same where the layout places experts by layer; empty: `experts` everywhere.
  std::vector<std::vector<int32_t>> placed_experts = {};
  /// Whether the rank adds biases of linears whose columns are divided; exactly one of a group does.
  bool adds_bias = true;
  bool is_whole = true;  // the rank has the whole model

  /// Routed experts of a decoder layer, or of an MTP module, whose layers follow.
  const std::vector<int32_t>& ExpertsOf(int layer) const {
    return layer < static_cast<int>(placed_experts.size()) ? placed_experts[layer] : experts;
  }
  bool operator==(const Shard&) const = default;
};

/// The whole model.
Shard WholeModel(const ModelShape& shape);

/// The part of `rank`. InvalidArgument: more stages than layers, more shards than attention heads, or more
/// parts than experts.
StatusOr<Shard> MakeShard(const Layout& layout, int rank, const ModelShape& shape);

/// Experts of each rank of an expert group, ascending: [ranks]. `layer` is a decoder layer with routed
/// experts; layers from shape.layers on are those of MTP modules. `layout` exchanges tokens.
std::vector<std::vector<int>> ExpertsByRank(const Layout& layout, const ModelShape& shape, int layer);

/// Divides [0, total) into `parts` ranges that differ by at most one `unit`; their boundaries are multiples
/// of it, and ranges may be empty.
std::vector<Range> Divide(int total, int unit, int parts);

}  // namespace moesaic::parallel
