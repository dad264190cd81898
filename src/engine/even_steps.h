// Evens out the rows of common steps, so that no replica makes the others wait.
#pragma once

#include <span>
#include <vector>

namespace moesaic::engine {

/// Rows that a replica could compute in its next step.
struct StepDemand {
  int decodes = 0;  // rows that no limit delays
  int prefill = 0;  // tokens of prompts, as far as they fit a step
  bool operator==(const StepDemand&) const = default;
};

/// Minimum row limit of a replica: large enough that chunks of prompts fill the kernels' row tiles.
inline constexpr int kMinStepRows = 128;
/// Minimum rows for the prompts of a replica that has some: one with more decodes than the mean would not
/// read them.
inline constexpr int kMinPromptRows = 32;

/// Returns the limits of the replicas' rows in a step. A replica's limit is the largest of: the mean rows of
/// all replicas with rows, kMinStepRows, and its decodes with up to kMinPromptRows tokens of prompts; but at
/// most `most`. While all replicas have prompts, all have the full limit. If one has a prompt and the others
/// decode, the prompt is read in smaller chunks. A single replica with rows has the full limit, because no
/// other one waits for it.
std::vector<int> EvenLimits(std::span<const StepDemand> demands, int most);

}  // namespace moesaic::engine
