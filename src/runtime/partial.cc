#include "runtime/partial.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

namespace moesaic::runtime {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".partial";

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

void RemoveLeftovers(const fs::path& path, PartialKind kind) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::string target = path.filename().string();
  const int flags = kind == PartialKind::kFile ? O_WRONLY | O_NONBLOCK : O_RDONLY | O_DIRECTORY;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (!IsPartialOf(entry.path().filename().string(), target)) continue;
    int descriptor = open(entry.path().c_str(), flags | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0 && errno == EACCES && kind == PartialKind::kFile) {
      // It replaces a read-only file.
      descriptor = open(entry.path().c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    }
    if (descriptor < 0) continue;
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry.path(), ignored);
    close(descriptor);
  }
}

// Creates `partial`, which must not exist. Returns -1 and sets errno on failure. EEXIST also reports that
// another writer's RemoveLeftovers removed the folder before it was opened: another name is needed.
int CreateNew(const std::string& partial, PartialKind kind) {
  if (kind == PartialKind::kFile) {
    return open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  }
  if (mkdir(partial.c_str(), 0777) != 0) return -1;
  const int descriptor = open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor >= 0) return descriptor;
  const int error = errno == ENOENT ? EEXIST : errno;
  rmdir(partial.c_str());
  errno = error;
  return -1;
}

// Returns false if another writer's RemoveLeftovers ran between creation and locking.
bool Lock(int descriptor) {
  struct stat status = {};
  // A file system without locks cannot tell leftovers apart, so the file is used without a lock.
  return flock(descriptor, LOCK_EX) != 0 || (fstat(descriptor, &status) == 0 && status.st_nlink > 0);
}

}  // namespace

Status SyncFolderOf(const std::string& path) {
  const fs::path whole(path);
  const fs::path folder = whole.has_parent_path() ? whole.parent_path() : ".";
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno == EACCES) return OkStatus();
    return IoError("{}: its folder can't be opened: {}", path, std::strerror(errno));
  }
  const int error = fsync(descriptor) == 0 ? 0 : errno;
  close(descriptor);
  if (error == 0 || error == EINVAL || error == ENOTSUP) return OkStatus();
  return IoError("{}: its folder can't be flushed to disk: {}", path, std::strerror(error));
}

bool IsPartialOf(std::string_view name, std::string_view target) {
  if (!name.starts_with(target) || !name.ends_with(kSuffix)) return false;
  if (name.size() <= target.size() + kSuffix.size() || name[target.size()] != '.') return false;
  name.remove_prefix(target.size() + 1);
  name.remove_suffix(kSuffix.size());
  const size_t dash = name.find('-');
  return dash != std::string_view::npos && IsNumber(name.substr(0, dash)) && IsNumber(name.substr(dash + 1));
}

StatusOr<Partial> CreatePartial(const std::string& path, PartialKind kind) {
  RemoveLeftovers(path, kind);
  // The process id and the counter separate writers of the same path, in two processes or in one.
  static std::atomic<int> count{0};
  while (true) {
    std::string partial = fmt::format("{}.{}-{}{}", path, getpid(), count.fetch_add(1), kSuffix);
    const int descriptor = CreateNew(partial, kind);
    if (descriptor < 0) {
      if (errno == EEXIST) continue;
      return IoError("{}: can't be written: {}", path, std::strerror(errno));
    }
    if (Lock(descriptor)) return Partial{std::move(partial), descriptor};
    close(descriptor);
  }
}

}  // namespace moesaic::runtime
