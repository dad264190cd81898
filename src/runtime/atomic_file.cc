#include "runtime/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "runtime/partial.h"

namespace moesaic::runtime {

StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path) {
  // Renaming over a device such as /dev/null would replace it; renaming over a folder would fail only at the
  // end.
  struct stat status = {};
  const bool exists = stat(path.c_str(), &status) == 0;
  if (exists && !S_ISREG(status.st_mode)) {
    return InvalidArgument("{}: can't be written: it is not a regular file", path);
  }
  // A rename would replace a link, so its target is written.
  std::string target = path;
  std::error_code error;
  if (std::filesystem::is_symlink(path, error)) {
    target = std::filesystem::weakly_canonical(path, error).string();
    if (error || !exists) {
      return InvalidArgument("{}: can't be written: it is a link to a file that does not exist", path);
    }
  }
  ASSIGN_OR_RETURN(Partial partial, CreatePartial(target, PartialKind::kFile));
  std::unique_ptr<AtomicFile> file(
      new AtomicFile(std::move(target), std::move(partial.path), fdopen(partial.descriptor, "wb")));
  // File systems without permissions of their own refuse every change.
  struct stat made = {};
  const mode_t wanted = status.st_mode & 0777;
  const int descriptor = fileno(file->file_);
  if (exists && fstat(descriptor, &made) == 0 && (made.st_mode & 0777) != wanted &&
      fchmod(descriptor, wanted) != 0 && errno != ENOSYS && errno != ENOTSUP) {
    return IoError("{}: can't get the permissions of the file that it replaces: {}", path,
                   std::strerror(errno));
  }
  return file;
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

Status AtomicFile::Reserve(int64_t bytes) {
  if (fallocate(fileno(file_), FALLOC_FL_KEEP_SIZE, 0, bytes) == 0) return OkStatus();
  if (errno == ENOSPC || errno == EFBIG || errno == EDQUOT) {
    return ResourceExhausted("{}: there is no room for {} bytes: {}", path_, bytes, std::strerror(errno));
  }
  return OkStatus();  // the file system does not reserve
}

Status AtomicFile::Commit() {
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) {
    return IoError("{}: writing failed: {}", path_, std::strerror(errno));
  }
  std::fclose(std::exchange(file_, nullptr));
  if (std::rename(partial_.c_str(), path_.c_str()) == 0) return SyncFolderOf(path_);
  const int error = errno;
  unlink(partial_.c_str());
  return IoError("{}: can't be renamed into place: {}", path_, std::strerror(error));
}

Status WriteFileAtomically(const std::string& path, std::string_view content) {
  ASSIGN_OR_RETURN(const auto file, AtomicFile::Create(path));
  RETURN_IF_ERROR(file->Write(content.data(), content.size()));
  return file->Commit();
}

}  // namespace moesaic::runtime
