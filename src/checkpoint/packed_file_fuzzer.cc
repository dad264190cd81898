// Fuzzes a packed file: parses its header and reads the first and last byte of each region.
#include "checkpoint/packed_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = moesaic::checkpoint::PackedFile::Parse(std::as_bytes(std::span(data, size)), "fuzz");
  if (!file.ok()) return 0;
  volatile std::byte sink{};
  for (const auto& region : (*file)->regions()) {
    const auto bytes = (*file)->Region(region.name);
    if (!bytes.ok() || static_cast<int64_t>(bytes->size()) != region.bytes) __builtin_trap();
    if (bytes->empty()) continue;
    sink = bytes->front();
    sink = bytes->back();
  }
  (void)sink;
  return 0;
}
