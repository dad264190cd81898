#include "engine/even_steps.h"

#include <algorithm>
#include <cstdint>

namespace moesaic::engine {

std::vector<int> EvenLimits(std::span<const StepDemand> demands, int most) {
  int64_t sum = 0;
  int busy = 0;
  for (const StepDemand& demand : demands) {
    const int rows = static_cast<int>(std::min<int64_t>(most, int64_t{demand.decodes} + demand.prefill));
    sum += rows;
    busy += rows > 0;
  }
  std::vector<int> limits(demands.size(), most);
  if (busy < 2) return limits;
  const int mean = static_cast<int>((sum + busy - 1) / busy);
  for (size_t i = 0; i < demands.size(); ++i) {
    const int least = demands[i].decodes + std::min(demands[i].prefill, kMinPromptRows);
    limits[i] = std::min(most, std::max({mean, kMinStepRows, least}));
  }
  return limits;
}

}  // namespace moesaic::engine
