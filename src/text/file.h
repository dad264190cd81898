// Reads the small files of a checkpoint folder. For this room only.
#pragma once

#include <filesystem>
#include <string>

#include "base/status.h"

namespace moesaic::text {

/// The bytes of a file. NotFound when there is none.
StatusOr<std::string> ReadFile(const std::filesystem::path& path);

}  // namespace moesaic::text
