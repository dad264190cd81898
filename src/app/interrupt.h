// Ctrl-C and its kin as a flag that long work looks at, so that it can stop between two steps and leave
// everything whole.
#pragma once

namespace moesaic::app {

/// The effect of SIGHUP while a guard lives.
enum class HangUp {
  kInterrupts,  ///< as SIGTERM has it; a SIGHUP that the caller ignores (nohup) stays ignored
  kReloads,     ///< TakeReload() reports it, and nothing is interrupted
};

/// While one lives, SIGINT, SIGTERM and SIGHUP set a flag instead of ending the process. The third signal in
/// a row that nobody cleared ends the process at once: a way out when something hangs.
class InterruptGuard {
 public:
  explicit InterruptGuard(HangUp hang_up = HangUp::kInterrupts);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
};

bool Interrupted();  ///< whether a signal has come since the last ClearInterrupt()
/// The number of the last signal, cleared or not; 0: none has come.
int LastSignal();
void ClearInterrupt();
/// Whether a SIGHUP has come since the last call, where a guard with HangUp::kReloads lives. Signals that
/// come close together count as one.
bool TakeReload();

}  // namespace moesaic::app
