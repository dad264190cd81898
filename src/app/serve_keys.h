// Reads the API keys of `moesaic serve` from flags and a file.
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

/// Reads the file at every call. Empty: no keys are set. Logs a warning if all users of this machine can read
/// the file.
StatusOr<std::vector<server::KeyEntry>> ReadKeys(const KeyFlags& flags);

}  // namespace moesaic::app
