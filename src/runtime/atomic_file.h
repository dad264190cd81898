// Writes a file that appears under its name only when it is complete.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::runtime {

/// Writes to `path.<numbers>.partial` next to `path` and renames it into place. Destruction before Commit()
/// removes the partial file. The next writer of the same path removes partial files of killed writers. A file
/// that is replaced passes on its permissions; if `path` is a link, its target is replaced.
class AtomicFile {
 public:
  static StatusOr<std::unique_ptr<AtomicFile>> Create(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Reserves room for the whole file, where the file system can. ResourceExhausted if there is too little.
  Status Reserve(int64_t bytes);
  Status Write(const void* data, size_t bytes);
  /// Syncs the file, renames it and syncs the folder: afterwards the file survives a power failure.
  Status Commit();

 private:
  AtomicFile(std::string path, std::string partial, std::FILE* file);
  std::string path_, partial_;
  std::FILE* file_;
};

/// Writes a whole file in one call.
Status WriteFileAtomically(const std::string& path, std::string_view content);

}  // namespace moesaic::runtime
