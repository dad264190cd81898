// The libraries that this binary was built with.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

/// (name, version) of each, as CMake and rust/text_bridge/Cargo.lock have them.
std::vector<std::pair<std::string, std::string>> Libraries();

}  // namespace moesaic::app
