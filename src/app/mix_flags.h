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
  std::vector<std::string> precisions;  // --mix; empty: no mix
  double bits_per_weight = 0;           // --bits-per-weight; 0: absent
  uint64_t budget = 0;                  // --budget, bytes of all weight files; 0: absent
  int64_t tokens = 2048;                // --mix-tokens
};

/// Declares the flags on `verb`. `flags` must outlive the parsing of the command line.
void AddMixFlags(Verb& verb, MixFlags& flags);

/// Returns the settings of a mix. InvalidArgument if there are fewer than two precisions, or an unknown or
/// repeated one. Exactly one of --bits-per-weight and --budget must be set. Neither is needed if no precision
/// rounds (bf16, fp16, fp32).
StatusOr<quantizer::MixSettings> ParseMix(const MixFlags& flags);

}  // namespace moesaic::app
