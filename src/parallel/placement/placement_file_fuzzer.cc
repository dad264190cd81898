// Fuzzes the parsers of placements. A placement that is read is written and read again as the same one.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "parallel/placement/placement_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::parallel;
  const auto placement = ParsePlacement({reinterpret_cast<const char*>(data), size}, "fuzz", 4);
  if (!placement.ok()) return 0;
  const auto text = PlacementBytes(*placement, PlacementFormat::kMoesaic);
  MOESAIC_CHECK(text.ok());
  const auto again = ParsePlacement(*text, "again", 0);
  MOESAIC_CHECK(again.ok() && again->layers == placement->layers);
  return 0;
}
