// Turns Ctrl-C and similar signals into a flag, so that long work can stop between two steps and leave
// consistent state.
#pragma once

namespace moesaic::app {

/// Effect of SIGHUP while a guard exists.
enum class HangUp {
  kInterrupts,  ///< like SIGTERM; a SIGHUP that the caller ignores (nohup) stays ignored
  kReloads,     ///< TakeReload() reports it; nothing is interrupted
};

/// While a guard exists, SIGINT, SIGTERM and SIGHUP set a flag instead of ending the process. The third
/// signal in a row without ClearInterrupt() ends the process at once, in case something hangs.
class InterruptGuard {
 public:
  explicit InterruptGuard(HangUp hang_up = HangUp::kInterrupts);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
};

bool Interrupted();  ///< true if a signal has arrived since the last ClearInterrupt()
/// Returns the number of the last signal, cleared or not; 0: none has arrived.
int LastSignal();
void ClearInterrupt();
/// True if a SIGHUP has arrived since the last call, while a guard with HangUp::kReloads exists. Signals in
/// quick succession count as one.
bool TakeReload();

}  // namespace moesaic::app
