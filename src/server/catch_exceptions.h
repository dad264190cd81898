// Converts exceptions to statuses, so that an exception ends one request and not the server.
#pragma once

#include <exception>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace moesaic::server {

/// Logs that an exception `why` escaped from `what`. Returns Internal without `why`, which clients must not
/// see.
Status Escaped(std::string_view what, std::string_view why);

/// Returns the status of `work`, or Escaped() with its exception.
template <typename Work>
Status CatchExceptions(std::string_view what, Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::exception& error) {
    return Escaped(what, error.what());
  } catch (...) {
    return Escaped(what, "an exception of unknown type");
  }
}

}  // namespace moesaic::server
