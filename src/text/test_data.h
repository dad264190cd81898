// Recorded inputs and expected outputs for this room's tests.
#pragma once

#include <zlib.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moesaic::text {

/// Returns the path of the shared test data; it may not exist.
inline std::filesystem::path SharedData() {
  return std::filesystem::path(MOESAIC_SOURCE_DIR) / ".." / "shared" / "data";
}

/// Returns the bytes of a file, decompressed if it is gzipped; empty if it does not exist.
inline std::string ReadMaybeGzip(const std::filesystem::path& path) {
  std::string bytes;
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) return bytes;
  char buffer[1 << 16];
  for (int got = gzread(file, buffer, sizeof buffer); got > 0; got = gzread(file, buffer, sizeof buffer)) {
    bytes.append(buffer, static_cast<size_t>(got));
  }
  gzclose(file);
  return bytes;
}

/// Returns the rows of a JSON-lines file.
inline std::vector<nlohmann::ordered_json> ReadRows(const std::filesystem::path& path) {
  std::vector<nlohmann::ordered_json> rows;
  const std::string bytes = ReadMaybeGzip(path);
  for (size_t at = 0; at < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', at), bytes.size());
    if (end > at) rows.push_back(nlohmann::ordered_json::parse(bytes.substr(at, end - at)));
    at = end + 1;
  }
  return rows;
}

}  // namespace moesaic::text

/// Skips the test with a message if the shared test data is missing.
#define SKIP_WITHOUT(path)                                                          \
  do {                                                                              \
    if (!std::filesystem::exists(path)) GTEST_SKIP() << "no test data: " << (path); \
  } while (false)
