// The API keys of `moesaic serve`, from flags and from a file.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "server/api_keys.h"

namespace moesaic::app {

struct KeyFlags {
  std::vector<std::string> api_keys, admin_keys;
  std::string file;
};

/// Reads the file again at every call. Empty: no keys are set. Warns in the log where everybody on this
/// machine may read the file.
StatusOr<std::vector<server::KeyEntry>> ReadKeys(const KeyFlags& flags);

}  // namespace moesaic::app
