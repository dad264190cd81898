#include "app/new_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffix = ".partial";

// A descriptor of a folder that nobody else has locked, or -1.
int Lock(const fs::path& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  struct stat status = {};
  // Somebody else's RemoveLeftovers may have come between opening and locking.
  if (descriptor >= 0 && flock(descriptor, LOCK_EX | LOCK_NB) == 0 && fstat(descriptor, &status) == 0 &&
      status.st_nlink > 0) {
    return descriptor;
  }
  if (descriptor >= 0) close(descriptor);
  return -1;
}

// Removes what killed runs left of `path`: partial folders that nobody has locked.
void RemoveLeftovers(const fs::path& path) {
  const std::string prefix = path.filename().string() + ".";
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path.parent_path(), ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) continue;
    const int lock = Lock(entry.path());
    if (lock < 0) continue;
    fs::remove_all(entry.path(), ignored);
    close(lock);
  }
}

}  // namespace

StatusOr<std::unique_ptr<NewFolder>> NewFolder::Create(const std::string& path) {
  std::error_code error;
  if (fs::exists(path, error) && (!fs::is_directory(path, error) || !fs::is_empty(path, error))) {
    return InvalidArgument("{}: is there already, and not an empty folder; name another", path);
  }
  std::string absolute = fs::absolute(path, error).lexically_normal().string();
  while (absolute.ends_with('/')) absolute.pop_back();
  RemoveLeftovers(absolute);
  const std::string partial = fmt::format("{}.{}{}", absolute, getpid(), kSuffix);
  fs::create_directories(fs::path(absolute).parent_path(), error);
  if (mkdir(partial.c_str(), 0777) != 0) {
    return IoError("{}: can't be written: {}", path, std::strerror(errno));
  }
  return std::unique_ptr<NewFolder>(new NewFolder(absolute, partial, Lock(partial)));
}

NewFolder::NewFolder(std::string path, std::string partial, int lock)
    : path_(std::move(path)), partial_(std::move(partial)), lock_(lock) {}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(partial_, ignored);
  if (lock_ >= 0) close(lock_);
}

Status NewFolder::Commit() {
  if (std::rename(partial_.c_str(), path_.c_str()) != 0) {
    return IoError("{}: can't be put in place: {}", path_, std::strerror(errno));
  }
  committed_ = true;
  return OkStatus();
}

}  // namespace moesaic::app
