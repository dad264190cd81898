#include "text/file.h"

#include <fstream>
#include <sstream>

namespace moesaic::text {

StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return NotFound("no file {}", path.string());
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  if (!file) return IoError("cannot read {}", path.string());
  return std::move(bytes).str();
}

}  // namespace moesaic::text
