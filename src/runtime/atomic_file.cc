#include "runtime/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace moesaic::runtime {

StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path) {
  // The process number keeps two runs that write the same file apart.
  std::string partial = fmt::format("{}.{}.partial", path, getpid());
  const int descriptor = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
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
