#include "quantizer/io/hidden_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/checksum.h"
#include "runtime/atomic_file.h"
#include "runtime/partial.h"

namespace moesaic::quantizer {
namespace {

// Bytes per read or write. The buffer of a read uses memory planned for other work.
constexpr size_t kPartBytes = size_t{1} << 20;

constexpr std::string_view kEnd = ".state";

// True if `name` is `prefix`, a number and ".state".
bool IsNumbered(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kEnd)) return false;
  if (name.size() <= prefix.size() + kEnd.size()) return false;
  name.remove_prefix(prefix.size());
  name.remove_suffix(kEnd.size());
  return name.find_first_not_of("0123456789") == std::string_view::npos;
}

// Returns the state's name for a file that is or was to become one.
std::string_view TargetOf(std::string_view name) {
  const size_t end = name.find(kEnd);
  const std::string_view target = end == std::string_view::npos ? name : name.substr(0, end + kEnd.size());
  return runtime::IsPartialOf(name, target) ? target : name;
}

bool IsCalibrationState(std::string_view name) {
  const std::string_view target = TargetOf(name);
  return target == kCalibrationStateFile || IsNumbered(target, kCalibrationState);
}
bool IsWhole(std::string_view name) { return TargetOf(name) == name; }

}  // namespace

std::string StateFile(std::string_view kind, int layers) { return fmt::format("{}{}{}", kind, layers, kEnd); }

std::string ChecksumOfFile(const std::string& path, int64_t* bytes) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> part(kPartBytes);
  base::Xxh3 sum;
  int64_t read = 0;
  while (file.read(part.data(), std::ssize(part)) || file.gcount() > 0) {
    sum.Add(part.data(), static_cast<size_t>(file.gcount()));
    read += file.gcount();
  }
  if (bytes != nullptr) *bytes = read;
  return sum.Hex();
}

StatusOr<std::string> SaveHidden(const std::string& path, std::span<const float> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  ASSIGN_OR_RETURN(const auto file, runtime::AtomicFile::Create(path));
  base::Xxh3 sum;
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
  int64_t size = 0;
  if (ChecksumOfFile(path, &size) != xxh3 || size != std::ssize(bytes)) return false;
  std::ifstream file(path, std::ios::binary);
  return static_cast<bool>(file.read(reinterpret_cast<char*>(bytes.data()), std::ssize(bytes)));
}

bool IsAnalysisState(std::string_view name) {
  const std::string_view target = TargetOf(name);
  return target == kAnalysisStateFile || target == kMixStateFile || IsNumbered(target, kAnalysisState) ||
         IsNumbered(target, kDecidedState) || IsNumbered(target, kFirstVariantState) ||
         IsNumbered(target, kVariantsState);
}

int64_t StateBytesIn(const std::string& folder) {
  std::error_code error;
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!IsWhole(name) || (!IsAnalysisState(name) && !IsCalibrationState(name))) continue;
    const uintmax_t of_file = entry.file_size(error);
    if (!error) bytes += static_cast<int64_t>(of_file);
  }
  return bytes;
}

Status RemoveStates(const std::string& folder, States which,
                    const std::function<bool(const std::string& name)>& keeps) {
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool analysis = IsAnalysisState(name), calibration = IsCalibrationState(name);
    if (which == States::kAnalysis ? !analysis : which == States::kCalibration ? !calibration : false)
      continue;
    if (!analysis && !calibration) continue;
    if (keeps && keeps(name)) continue;
    if (which != States::kUnfinished || !IsWhole(name)) found.push_back(entry.path());
  }
  for (const std::filesystem::path& path : found) {
    std::filesystem::remove(path, error);
    if (error) return IoError("{}: cannot be removed: {}", path.string(), error.message());
  }
  return OkStatus();
}

}  // namespace moesaic::quantizer
