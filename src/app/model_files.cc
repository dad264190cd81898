#include "app/model_files.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

namespace moesaic::app {
namespace {

Status Append(const std::filesystem::path& file, std::vector<std::string>* lines) {
  struct stat status = {};
  if (stat(file.c_str(), &status) != 0) return IoError("{}: {}", file.string(), std::strerror(errno));
  if (S_ISREG(status.st_mode)) {
    lines->push_back(fmt::format("{} {} {}.{:09}\n", file.filename().string(), status.st_size,
                                 status.st_mtim.tv_sec, status.st_mtim.tv_nsec));
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::string> DescribeFiles(const std::string& path) {
  std::vector<std::string> lines;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    const std::filesystem::directory_iterator end;
    for (auto it = std::filesystem::directory_iterator(path, error); !error && it != end;
         it.increment(error)) {
      RETURN_IF_ERROR(Append(it->path(), &lines));
    }
    if (error) return IoError("{}: can't be read: {}", path, error.message());
  } else {
    RETURN_IF_ERROR(Append(path, &lines));
  }
  std::ranges::sort(lines);
  return fmt::format("{}", fmt::join(lines, ""));
}

}  // namespace moesaic::app
