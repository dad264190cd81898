// Reads calibration text that is stored as token ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::quantizer {

/// Reads token ids from the tensor "tokens" (I32 [sequences, length]) of a safetensors file. -1 pads the ends
/// of short sequences. Stops before the sequence that would exceed `max_tokens` tokens in all.
StatusOr<std::vector<std::vector<int32_t>>> ReadCalibrationTokens(const std::string& path, int vocab,
                                                                  int max_tokens);

}  // namespace moesaic::quantizer
