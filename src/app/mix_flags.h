// --mix of `moesaic quantize`, and its budget.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/flags.h"
#include "base/status.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::app {

struct MixFlags {
  std::vector<std::string> precisions;  // empty: no mix
  double bits_per_weight = 0;           // of the budgets one is not 0
  uint64_t budget = 0, budget_per_token = 0;
  int64_t tokens = 2048;
};

void AddMixFlags(Verb& verb, MixFlags& flags);

/// "w4a16" and "w8a16" among the precisions have groups of `group_size`. Refuses names that are none or come
/// twice, and any number of budgets but one; precisions that are all kept need none.
StatusOr<quantizer::MixSettings> ParseMix(const MixFlags& flags, int group_size);

}  // namespace moesaic::app
