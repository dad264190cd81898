#include "app/libraries.h"

#include <sstream>

namespace moesaic::app {

std::vector<std::pair<std::string, std::string>> Libraries() {
  std::vector<std::pair<std::string, std::string>> libraries;
  std::istringstream words(MOESAIC_LIBRARIES);  // "Boost 1.74.0 abseil 20220623 ..."
  for (std::string name, version; words >> name >> version;) libraries.emplace_back(name, version);
  return libraries;
}

}  // namespace moesaic::app
