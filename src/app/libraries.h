// Versions of the libraries that this binary was built with.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace moesaic::app {

/// Returns (name, version) of each library, from CMake and rust/text_bridge/Cargo.lock.
std::vector<std::pair<std::string, std::string>> Libraries();

}  // namespace moesaic::app
