// Size and cost of one rank's part of a model, which a planner compares between layouts.
#pragma once

#include <cstdint>

namespace moesaic::parallel {

struct RankWork {
  double weight_bytes = 0;        ///< in memory, MTP included
  double kv_bytes_per_token = 0;  ///< of the KV cache
  int layers = 0;                 ///< decoder layers
  bool has_embedding = false, has_head = false;

  // Weights read per step, and multiplications and additions per row.
  double read_bytes = 0, flops_per_row = 0;
  // The same for the head: weights read per step with logits, and operations per row with logits.
  double head_bytes = 0, head_flops_per_row = 0;

  // Routed experts. A row computes `top_k` of the `all_experts` of all ranks in each layer.
  int expert_layers = 0;
  int all_experts = 0, top_k = 0;                     ///< per layer
  double expert_bytes = 0, expert_flops_per_row = 0;  ///< of this rank's slice of one expert
};

}  // namespace moesaic::parallel
