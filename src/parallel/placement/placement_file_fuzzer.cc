// Fuzzes the parsers of placements. A placement that is read is written and read again as the same one.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "parallel/placement/placement_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::parallel;
  const auto placement = ParsePlacement({reinterpret_cast<const char*>(data), size}, "fuzz", 4);
  if (!placement.ok()) return 0;
  MOESAIC_CHECK(PlacementBytes(*placement, PlacementFormat::kMoesaic).ok());
  for (const PlacementFormat format : {PlacementFormat::kMoesaic, PlacementFormat::kEplb,
                                       PlacementFormat::kSglang, PlacementFormat::kTensorRt}) {
    const auto text = PlacementBytes(*placement, format);
    if (!text.ok()) continue;  // unequal slots
    const auto again = ParsePlacement(*text, "again", 4);
    MOESAIC_CHECK(again.ok() && again->layers == placement->layers);
  }
  return 0;
}
