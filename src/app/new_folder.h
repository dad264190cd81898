// Creates a folder atomically.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace moesaic::app {

/// Files are written to `path.<numbers>.partial`, which Commit renames to `path`. Without Commit the partial
/// folder is removed. The next writer of the same path removes one that a killed process left.
class NewFolder {
 public:
  /// `path` must not exist, or be an empty folder or a link to one, which is then filled.
  static StatusOr<std::unique_ptr<NewFolder>> Create(const std::string& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& partial() const { return partial_; }
  Status Commit();

 private:
  NewFolder(std::string path, std::string partial, int lock);
  std::string path_, partial_;
  int lock_;  // descriptor of the folder; its lock ends with the process
  bool committed_ = false;
};

}  // namespace moesaic::app
