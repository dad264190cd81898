#include "quantizer/calibrate/rare_experts.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace moesaic::quantizer {

// In the order of the enumerators.
std::vector<std::string> RareExpertsNames() { return {"shrink", "identity", "all"}; }

std::string RareExpertsName(RareExperts rare) { return RareExpertsNames()[static_cast<size_t>(rare)]; }

StatusOr<RareExperts> ParseRareExperts(const std::string& name) {
  const std::vector<std::string> names = RareExpertsNames();
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    return InvalidArgument("what becomes of rare experts must be one of {}, found \"{}\"",
                           fmt::join(names, ", "), name);
  }
  return static_cast<RareExperts>(found - names.begin());
}

}  // namespace moesaic::quantizer
