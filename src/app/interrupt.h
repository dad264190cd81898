// Ctrl-C as a flag that long work looks at, so that it can stop between two steps and leave everything whole.
#pragma once

namespace moesaic::app {

/// While one lives, SIGINT and SIGTERM set a flag instead of ending the process. The third signal in a row
/// that nobody cleared ends the process at once: a way out when something hangs.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
};

bool Interrupted();  ///< whether a signal has come since the last ClearInterrupt()
void ClearInterrupt();

}  // namespace moesaic::app
