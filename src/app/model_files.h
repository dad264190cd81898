// Lists the files of a model.
#pragma once

#include <string>

#include "base/status.h"

namespace moesaic::app {

/// Returns name, size and modification time of the file at `path` (of all parts of a split GGUF), or of each
/// file in that folder. Models that were trained, converted or copied separately differ in these.
StatusOr<std::string> DescribeFiles(const std::string& path);

}  // namespace moesaic::app
