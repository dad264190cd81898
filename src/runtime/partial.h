// Files and folders in progress. They have a temporary name until they are complete:
// `path.<process>-<number>.partial`.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::runtime {

enum class PartialKind { kFile, kFolder };

/// A file or folder that its writer has locked. The lock ends with the process, which distinguishes leftovers
/// of killed writers from files still being written.
struct Partial {
  std::string path;
  int descriptor;  // owned by the caller; open for writing (file) or for the lock only (folder)
};

/// Creates an empty partial file or folder next to `path`, and removes those that killed writers of `path`
/// left.
StatusOr<Partial> CreatePartial(const std::string& path, PartialKind kind);

/// Flushes the folder of `path` to disk, so that `path` keeps its name after a power failure. Call it after a
/// rename. Folders that the file system does not flush, or that the process must not read, are left alone.
Status SyncFolderOf(const std::string& path);

/// Returns whether CreatePartial could have created `name` for `target`; a user's "f.notes.partial" does not
/// belong to "f". Both are names without folders.
bool IsPartialOf(std::string_view name, std::string_view target);

}  // namespace moesaic::runtime
