#include "runtime/atomic_file.h"

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

constexpr std::string_view kSuffix = ".partial";

// Removes what killed runs left of `path`: partial files that nobody has locked, since a lock ends with its
// process.
void RemoveLeftovers(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::string prefix = path.filename().string() + ".";
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) continue;
    const int descriptor = open(entry.path().c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor < 0) continue;
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
    close(descriptor);
  }
}

// Opens and locks `partial`. It is tried again if someone else's RemoveLeftovers came between the two.
int OpenLocked(const std::string& partial) {
  while (true) {
    const int descriptor = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0) return descriptor;
    struct stat status = {};
    // Where the file system has no locks there are no leftovers to tell apart either: the file is used as it
    // is.
    if (flock(descriptor, LOCK_EX) != 0 || (fstat(descriptor, &status) == 0 && status.st_nlink > 0))
      return descriptor;
    close(descriptor);
  }
}

}  // namespace

StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path) {
  // Renaming over a device, such as /dev/null, would replace it; a folder would refuse only at the end.
  struct stat status = {};
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return InvalidArgument("{}: can't be written: it is not a regular file", path);
  }
  RemoveLeftovers(path);
  // The numbers keep two writers of the same file apart, in two processes or in one.
  static std::atomic<int> count{0};
  std::string partial = fmt::format("{}.{}-{}{}", path, getpid(), count.fetch_add(1), kSuffix);
  const int descriptor = OpenLocked(partial);
  if (descriptor < 0) return IoError("{}: can't be written: {}", path, std::strerror(errno));
  return std::unique_ptr<AtomicFile>(new AtomicFile(path, std::move(partial), fdopen(descriptor, "wb")));
}

AtomicFile::AtomicFile(std::string path, std::string partial, std::FILE* file)
    : path_(std::move(path)), partial_(std::move(partial)), file_(file) {}

AtomicFile::~AtomicFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  unlink(partial_.c_str());
}

Status AtomicFile::Write(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, file_) == bytes) return OkStatus();
  return IoError("{}: writing failed: {}", path_, std::strerror(errno));
}

Status AtomicFile::Commit() {
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) {
    return IoError("{}: writing failed: {}", path_, std::strerror(errno));
  }
  std::fclose(std::exchange(file_, nullptr));
  if (std::rename(partial_.c_str(), path_.c_str()) == 0) return OkStatus();
  const int error = errno;
  unlink(partial_.c_str());
  return IoError("{}: can't be put in place: {}", path_, std::strerror(error));
}

}  // namespace moesaic::runtime
