// Where exceptions stop: what one request throws is that request's fault, not the server's end.
#pragma once

#include <exception>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace moesaic::server {

/// Logs `why` as what escaped from `what`, and returns Internal, which does not tell it to the client.
Status Escaped(std::string_view what, std::string_view why);

/// The status of `work`, or Escaped with the exception that came out of it.
template <typename Work>
Status Contained(std::string_view what, Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::exception& error) {
    return Escaped(what, error.what());
  } catch (...) {
    return Escaped(what, "an exception of unknown type");
  }
}

}  // namespace moesaic::server
