// Routing of tokens to experts.
#pragma once

#include <cstdint>

#include "kernels/exec_context.h"

namespace moesaic::kernels {

/// Selects routed experts and weights from router logits:
/// - Scores are the softmax or sigmoid of the logits; the bias is added for the choice only.
/// - Groups are ranked by their members' choice scores. Groups other than the best top_groups are excluded
///   completely, like in transformers' current DeepseekV3TopkRouter. (Older versions set their scores to 0,
///   which could win over negative ones.)
/// - The top_k best choices in the remaining groups are weighted by their scores without bias.
///
/// Requires top_k <= top_groups * (experts / groups), and two experts per group for kTopTwoSum. NaN logits
/// give valid, distinct ids; with softmax also NaN weights.
struct RouteParams {
  enum class Scoring { kSoftmax, kSigmoid };
  enum class GroupScore { kMax, kTopTwoSum };  // V2: best expert of a group; V3 noaux_tc: sum of its best two
  const float* logits;                         // [rows, experts]
  const float* bias = nullptr;  // [experts] added to scores for the choice only (noaux_tc), or null
  int rows, experts, top_k;
  Scoring scoring;
  int groups = 1,
      top_groups = 1;  // experts form `groups` equal ranges; only the best top_groups are eligible
  GroupScore group_score = GroupScore::kMax;
  bool normalize = false;  // divides weights by their sum (+1e-20 for sigmoid, like the releases)
  float scale = 1;         // routed_scaling_factor
  int32_t* ids;            // [rows, top_k], by descending choice score, ties to the lower id
  float* weights;          // [rows, top_k]
};
void Route(const ExecContext& ctx, const RouteParams& params);

}  // namespace moesaic::kernels
