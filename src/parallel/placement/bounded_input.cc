#include "parallel/placement/bounded_input.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/lfs_pointer.h"
#include "checkpoint/json_text.h"
#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {
namespace {

// Maximum number of lists, objects and members of objects.
constexpr std::ptrdiff_t kMaxJsonLists = std::ptrdiff_t{4} << 20;

}  // namespace

StatusOr<std::string> ReadBoundedFile(const std::string& path, size_t max_bytes) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return InvalidArgument("{}: must be a file, found a folder", path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("{}: cannot be opened: {}", path, std::strerror(errno));
  std::string bytes;
  std::string buffer(size_t{1} << 20, '\0');
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || file.gcount() > 0) {
    bytes.append(buffer, 0, static_cast<size_t>(file.gcount()));
    if (bytes.size() > max_bytes)
      return InvalidArgument("{}: must be at most {} bytes, found more", path, max_bytes);
  }
  if (file.bad()) return IoError("{}: cannot be read", path);
  RETURN_IF_ERROR(base::CheckFetched(bytes, path));
  return bytes;
}

StatusOr<nlohmann::json> ParseBoundedJson(std::string_view text, const std::string& source) {
  if (std::count(text.begin(), text.end(), ',') > 2 * kMaxLoadValues)
    return InvalidArgument("{}: must have at most {} values of JSON; a .npy file needs less memory", source,
                           2 * kMaxLoadValues);
  const auto lists =
      std::count_if(text.begin(), text.end(), [](char c) { return c == '[' || c == '{' || c == ':'; });
  if (lists > kMaxJsonLists)
    return InvalidArgument("{}: must have at most {} lists, objects and members, found {}", source,
                           kMaxJsonLists, lists);
  return checkpoint::ParseJsonObject(text, source);
}

}  // namespace moesaic::parallel
