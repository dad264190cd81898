// Reads untrusted files with bounds on memory.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::parallel {

/// Reads a file or a pipe. InvalidArgument for a folder and for more than `max_bytes`, NotFound or IoError
/// with the reason if it cannot be read.
StatusOr<std::string> ReadBoundedFile(const std::string& path, size_t max_bytes = size_t{512} << 20);

/// Parses a JSON object. InvalidArgument if it has more values than two arrays of kMaxLoadValues, or more
/// than 4 Mi lists, objects and members: parsed values take many times the memory of their text.
StatusOr<nlohmann::json> ParseBoundedJson(std::string_view text, const std::string& source);

}  // namespace moesaic::parallel
