#include "comm/transport/idle_backoff.h"

#include <emmintrin.h>
#include <sched.h>
#include <sys/prctl.h>

#include <chrono>
#include <thread>

namespace moesaic::comm {
namespace {

constexpr int kPauses = 4;  // 40 to 140 cycles each
constexpr int kPausingWaits = 64, kYieldingWaits = 2048;
constexpr std::chrono::microseconds kNap{15};

// Linux delays the end of a sleep by up to 50 us, unless a thread sets another slack.
void SleepShortly() {
  thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0) == 0;
  (void)precise;
  std::this_thread::sleep_for(kNap);
}

}  // namespace

void IdleBackoff::Wait() {
  if (waits_ >= kYieldingWaits) return SleepShortly();
  ++waits_;
  for (int i = 0; i < kPauses; ++i) _mm_pause();
  if (waits_ >= kPausingWaits) sched_yield();
}

}  // namespace moesaic::comm
