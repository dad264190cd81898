// What GPTQ rounds an expert by that few calibration tokens reach.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::quantizer {

enum class RareExperts : uint8_t {
  kShrink,    // its Hessian leans on its layer's, by as much as chance may have made of it
  kIdentity,  // it is rounded to the nearest below kCoveredTokens tokens; its own Hessian alone above
  kAll,       // every token of the layer goes to every expert's Hessian
};

std::vector<std::string> RareExpertsNames();
std::string RareExpertsName(RareExperts rare);
StatusOr<RareExperts> ParseRareExperts(const std::string& name);

}  // namespace moesaic::quantizer
