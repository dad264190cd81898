// Safetensors files in memory, for tests and fuzzers of all rooms.
#pragma once

#include <cstdint>
#include <string>

namespace moesaic::checkpoint {

/// Returns a safetensors file with this header followed by `data`.
inline std::string SafetensorsFile(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
  return file + header + data;
}

}  // namespace moesaic::checkpoint
