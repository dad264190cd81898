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

}  // namespace moesaic::text
