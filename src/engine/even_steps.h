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

/// Least limit of a replica's rows: large enough that chunks of prompts fill the kernels' row tiles.
inline constexpr int kMinStepRows = 128;

/// Limits of the replicas' rows in a step, at most `most` each. A replica may compute the mean of all
/// replicas that have rows, or kMinStepRows, or its decodes. So all have the full limit while all have
/// prompts, while one replica's prompt in the midst of the others' decodes is read in smaller chunks. A
/// single replica with rows makes no other one wait.
std::vector<int> EvenLimits(std::span<const StepDemand> demands, int most);

}  // namespace moesaic::engine
