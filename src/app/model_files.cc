#include "app/model_files.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <string_view>
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

// Returns all parts if `path` is the first of several, "...-00001-of-00003.gguf"; else `path`.
std::vector<std::string> PartsOf(const std::string& path) {
  constexpr std::string_view kFirst = "-00001-of-", kEnd = ".gguf";
  constexpr size_t kDigits = 5;
  const size_t tail = kFirst.size() + kDigits + kEnd.size();
  if (path.size() < tail || !path.ends_with(kEnd)) return {path};
  const std::string stem = path.substr(0, path.size() - tail);
  const char* digits = path.data() + stem.size() + kFirst.size();
  int parts = 0;
  const auto read = std::from_chars(digits, digits + kDigits, parts);
  if (!path.substr(stem.size()).starts_with(kFirst) || read.ptr != digits + kDigits || parts < 1)
    return {path};
  std::vector<std::string> paths;
  for (int part = 1; part <= parts; ++part) {
    paths.push_back(fmt::format("{}-{:05}-of-{:05}{}", stem, part, parts, kEnd));
  }
  return paths;
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
    if (error) return IoError("{}: cannot be read: {}", path, error.message());
  } else {
    for (const std::string& part : PartsOf(path)) RETURN_IF_ERROR(Append(part, &lines));
  }
  std::ranges::sort(lines);
  return fmt::format("{}", fmt::join(lines, ""));
}

}  // namespace moesaic::app
