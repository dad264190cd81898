#include "app/new_folder.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "runtime/partial.h"

namespace moesaic::app {

namespace fs = std::filesystem;

StatusOr<std::unique_ptr<NewFolder>> NewFolder::Create(const std::string& path) {
  std::error_code error;
  if (fs::exists(path, error) && (!fs::is_directory(path, error) || !fs::is_empty(path, error))) {
    return InvalidArgument("{}: exists already and is not an empty folder; choose another name", path);
  }
  // A link cannot be replaced by a rename, so its target is written.
  std::string target = fs::weakly_canonical(fs::absolute(path, error), error).string();
  while (target.ends_with('/')) target.pop_back();
  if (error || fs::is_symlink(target, error)) {
    return InvalidArgument("{}: is a dangling link; choose another name", path);
  }
  fs::create_directories(fs::path(target).parent_path(), error);
  auto partial = runtime::CreatePartial(target, runtime::PartialKind::kFolder);
  if (!partial.ok()) return partial.status();
  return std::unique_ptr<NewFolder>(
      new NewFolder(std::move(target), std::move(partial->path), partial->descriptor));
}

NewFolder::NewFolder(std::string path, std::string partial, int lock)
    : path_(std::move(path)), partial_(std::move(partial)), lock_(lock) {}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(partial_, ignored);
  close(lock_);
}

Status NewFolder::Commit() {
  if (std::rename(partial_.c_str(), path_.c_str()) != 0) {
    return IoError("{}: cannot be renamed into place: {}", path_, std::strerror(errno));
  }
  committed_ = true;
  return runtime::SyncFolderOf(path_);
}

}  // namespace moesaic::app
