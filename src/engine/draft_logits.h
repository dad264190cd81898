// What a drafter makes of its logits.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

namespace moesaic::engine {

/// The token of the greatest logit, the lower id of equals; -1 where one is not a number.
inline int32_t LikeliestToken(std::span<const float> logits) {
  int32_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = static_cast<int32_t>(i);
  }
  return best;
}

}  // namespace moesaic::engine
