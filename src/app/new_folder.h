// Creates a folder atomically.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace moesaic::app {

/// A folder that appears under its name only when it is complete. Files are written to partial(), a folder
/// `path.<numbers>.partial` next to `path`, and Commit renames it to `path`. The destructor removes a partial
/// folder that was not committed. If a process was killed, the next writer of the same path removes its
/// folder.
class NewFolder {
 public:
  /// Creates the partial folder and the parents of `path`. InvalidArgument unless `path` is new, an empty
  /// folder, or a link to an empty folder. Commit replaces the empty folder, and a link stays.
  static StatusOr<std::unique_ptr<NewFolder>> Create(const std::string& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& partial() const { return partial_; }  ///< folder to write files to
  /// Renames the folder into place and flushes its name to the disk, but not its files. IoError if `path` is
  /// no longer empty.
  Status Commit();

 private:
  NewFolder(std::string path, std::string partial, int lock);
  std::string path_, partial_;
  int lock_;  // descriptor of the folder; its lock ends with the process
  bool committed_ = false;
};

}  // namespace moesaic::app
