// Flags of `moesaic quantize --mix`.
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
  double bits_per_weight = 0;           // 0: not given
  uint64_t budget = 0;                  // 0: not given
  int64_t tokens = 2048;
};

void AddMixFlags(Verb& verb, MixFlags& flags);

/// Fails for unknown or repeated precisions, and unless exactly one budget is given. Precisions that are all
/// kept need none.
StatusOr<quantizer::MixSettings> ParseMix(const MixFlags& flags);

}  // namespace moesaic::app
