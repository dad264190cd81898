#include "quantizer/hidden_state.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "quantizer/checksum.h"
#include "runtime/atomic_file.h"

namespace moesaic::quantizer {
namespace {

// Written or read at once.
constexpr size_t kPartBytes = size_t{16} << 20;

}  // namespace

std::string ChecksumOfFile(const std::string& path, int64_t bytes) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> part(kPartBytes);
  Xxh3 sum;
  int64_t read = 0;
  while (file.read(part.data(), std::ssize(part)) || file.gcount() > 0) {
    sum.Add(part.data(), static_cast<size_t>(file.gcount()));
    read += file.gcount();
  }
  return read == bytes ? sum.Hex() : "none";
}

StatusOr<std::string> SaveHidden(const std::string& path, std::span<const float> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  ASSIGN_OR_RETURN(const auto file, runtime::AtomicFile::Create(path));
  Xxh3 sum;
  for (size_t at = 0; at < bytes.size(); at += kPartBytes) {
    const auto part = bytes.subspan(at, std::min(kPartBytes, bytes.size() - at));
    RETURN_IF_ERROR(file->Write(part.data(), part.size()));
    sum.Add(part.data(), part.size());
  }
  RETURN_IF_ERROR(file->Commit());
  return sum.Hex();
}

bool LoadHidden(const std::string& path, const std::string& xxh3, std::span<float> values) {
  const std::span<std::byte> bytes = std::as_writable_bytes(values);
  if (ChecksumOfFile(path, std::ssize(bytes)) != xxh3) return false;
  std::ifstream file(path, std::ios::binary);
  return static_cast<bool>(file.read(reinterpret_cast<char*>(bytes.data()), std::ssize(bytes)));
}

bool IsAnalysisState(std::string_view name) {
  return name.starts_with("analysis-") && name.find(".state") != std::string_view::npos;
}

Status RemoveStates(const std::string& folder, bool analysis) {
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool calibration = name.starts_with("calibration-") && name.find(".state") != std::string::npos;
    if (IsAnalysisState(name) || (!analysis && calibration)) found.push_back(entry.path());
  }
  for (const std::filesystem::path& path : found) {
    std::filesystem::remove(path, error);
    if (error) return IoError("{}: can't be removed: {}", path.string(), error.message());
  }
  return OkStatus();
}

}  // namespace moesaic::quantizer
