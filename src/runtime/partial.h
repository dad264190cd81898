// What is being written, under a name of its own until it is complete: `path.<process>-<number>.partial`.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::runtime {

enum class PartialKind { kFile, kFolder };

/// A file or folder that its writer has locked. The lock ends with the process, which tells the leftovers of
/// killed writers from what is still being written.
struct Partial {
  std::string path;
  int descriptor;  // the caller's to close; of a file for writing, of a folder for its lock only
};

/// Creates an empty one beside `path` and removes what killed writers of `path` left there.
StatusOr<Partial> CreatePartial(const std::string& path, PartialKind kind);

/// Whether CreatePartial makes files called `name` for one called `target`; a user's "f.notes.partial" is
/// none of "f". Names without folders.
bool IsPartialOf(std::string_view name, std::string_view target);

}  // namespace moesaic::runtime
