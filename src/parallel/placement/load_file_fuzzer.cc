// Fuzzes the parsers of loads and of cost files. A load that is read has values within the limits.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "parallel/placement/layer_cost.h"
#include "parallel/placement/load_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::parallel;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto load = ParseLoad(bytes, "fuzz");
  if (load.ok()) MOESAIC_CHECK(CheckLoad(load->total, "again").ok());
  const auto tensors = ParseTensorRtFile(bytes, "fuzz.safetensors");
  if (tensors.ok()) MOESAIC_CHECK(CheckLoad(tensors->total, "again").ok());
  const auto cost = ParseCostModel(bytes, "fuzz.json");
  if (cost.ok() && CheckCostModel(*cost, 256, 32).ok()) MOESAIC_CHECK(ExpertTime(*cost)(100) >= 0);
  std::vector<std::vector<double>> layers;
  int64_t values = 0;
  (void)ParseOmniText(bytes, "fuzz.txt", layers, values);
  return 0;
}
