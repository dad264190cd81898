// Ctrl-C and its kin as a flag that long work looks at, so that it can stop between two steps and leave
// everything whole.
#pragma once

namespace moesaic::app {

/// While one lives, SIGINT, SIGTERM and SIGHUP set a flag instead of ending the process. The third signal in
/// a row that nobody cleared ends the process at once: a way out when something hangs. A SIGHUP that the
/// caller ignores (nohup) stays ignored.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
};

bool Interrupted();  ///< whether a signal has come since the last ClearInterrupt()
/// The number of the last signal, cleared or not; 0: none has come.
int LastSignal();
void ClearInterrupt();

}  // namespace moesaic::app
