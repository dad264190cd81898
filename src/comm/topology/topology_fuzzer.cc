// Fuzzes the parser of topology files. A file that is read is written, and read again as the same topology.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "comm/topology/topology.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using moesaic::comm::Topology;
  const auto topology = Topology::Parse({reinterpret_cast<const char*>(data), size}, "fuzz.json");
  if (!topology.ok()) return 0;
  const int last = topology->ranks() - 1;
  (void)topology->Path(0, last);
  (void)topology->Bandwidth(last, 0);
  const std::string text = topology->ToJson();
  const auto again = Topology::Parse(text, "again.json");
  MOESAIC_CHECK(again.ok());
  MOESAIC_CHECK(again->ToJson() == text);
  return 0;
}
