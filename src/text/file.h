// Reads small files of a checkpoint folder. Private to this room.
#pragma once

#include <filesystem>
#include <string>

#include "base/status.h"

namespace moesaic::text {

/// Returns the bytes of a file, or NotFound if it does not exist.
StatusOr<std::string> ReadFile(const std::filesystem::path& path);

/// Returns `otherwise` if there is no such file.
StatusOr<std::string> ReadIfThere(const std::filesystem::path& path, std::string otherwise);

}  // namespace moesaic::text
