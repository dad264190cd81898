// Which files a model is made of.
#pragma once

#include <string>

#include "base/status.h"

namespace moesaic::app {

/// Name, size and time of the last change of the file at `path` (of all parts, where it is the first of a
/// split GGUF), or of each file in that folder: two models that were trained, converted or copied apart have
/// other ones.
StatusOr<std::string> DescribeFiles(const std::string& path);

}  // namespace moesaic::app
