// Fuzzes the parsers of placements. A placement that is read is written and read again as the same one.
// Inputs are also the array of a .npz file whose CRC-32 is right, which changed .npz files do not have.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "parallel/placement/numpy_file.h"
#include "parallel/placement/placement_file.h"

namespace {

void Check(std::string_view bytes) {
  using namespace moesaic::parallel;
  const auto placement = ParsePlacement(bytes, "fuzz", 4);
  if (!placement.ok()) return;
  MOESAIC_CHECK(PlacementBytes(*placement, PlacementFormat::kMoesaic).ok());
  for (const PlacementFormat format : {PlacementFormat::kMoesaic, PlacementFormat::kEplb,
                                       PlacementFormat::kSglang, PlacementFormat::kTensorRt}) {
    const auto text = PlacementBytes(*placement, format);
    if (!text.ok()) continue;  // unequal slots
    const auto again = ParsePlacement(*text, "again", 4);
    MOESAIC_CHECK(again.ok() && again->layers == placement->layers);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  Check(bytes);
  const std::pair<std::string, std::string> files[] = {{"phy2log", bytes}};
  Check(moesaic::parallel::NumpyZipBytes(files));
  return 0;
}
