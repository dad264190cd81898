#include "text/file.h"

#include <fstream>
#include <sstream>

#include "base/lfs_pointer.h"

namespace moesaic::text {

StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return NotFound("no file {}", path.string());
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  if (!file) return IoError("cannot read {}", path.string());
  std::string text = std::move(bytes).str();
  RETURN_IF_ERROR(base::CheckFetched(text, path.string()));
  return text;
}

StatusOr<std::string> ReadIfThere(const std::filesystem::path& path, std::string otherwise) {
  StatusOr<std::string> bytes = ReadFile(path);
  if (!bytes.ok() && bytes.status().code() == StatusCode::kNotFound) return otherwise;
  return bytes;
}

}  // namespace moesaic::text
