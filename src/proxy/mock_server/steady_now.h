// The clock of the mock engine's process.
#pragma once

#include <chrono>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

inline Nanos SteadyNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace moesaic::proxy
