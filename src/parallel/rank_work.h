// Size and cost of one rank's part of a model, which a planner compares between layouts.
#pragma once

#include <cstdint>

namespace moesaic::parallel {

struct RankWork {
  double weight_bytes = 0;        ///< in memory, MTP included
  double kv_bytes_per_token = 0;  ///< of the KV cache
  int layers = 0;                 ///< decoder layers
  bool has_embedding = false, has_head = false;

  // Of every step: the weights that it reads, and multiplications and additions per row.
  double read_bytes = 0, flops_per_row = 0;
  // Of steps that compute logits, per row with logits.
  double head_bytes = 0, head_flops_per_row = 0;

  // Routed experts, of which a row computes `top_k` of all ranks' `all_experts` per layer.
  int expert_layers = 0;
  int all_experts = 0, top_k = 0;                     ///< per layer
  double expert_bytes = 0, expert_flops_per_row = 0;  ///< of this rank's slice of one expert
};

}  // namespace moesaic::parallel
