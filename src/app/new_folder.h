// A folder that appears under its name only when it is complete.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace moesaic::app {

/// Filled beside `path`, in `path.<numbers>.partial`, and renamed into place. A run that ends before Commit
/// leaves nothing behind; what a killed one left, the next writer of the same path removes.
class NewFolder {
 public:
  /// `path` must not be there, or be an empty folder or a link to one, which then is filled.
  static StatusOr<std::unique_ptr<NewFolder>> Create(const std::string& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& partial() const { return partial_; }
  Status Commit();

 private:
  NewFolder(std::string path, std::string partial, int lock);
  std::string path_, partial_;
  int lock_;  // a descriptor of the folder; its lock ends with the process
  bool committed_ = false;
};

}  // namespace moesaic::app
