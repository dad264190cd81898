#include "app/interrupt.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>

namespace moesaic::app {
namespace {

constexpr std::array<int, 3> kSignals = {SIGHUP, SIGTERM, SIGINT};

volatile std::sig_atomic_t interrupts = 0, last_signal = 0, reloads = 0;

void OnSignal(int number) {
  last_signal = number;
  interrupts = interrupts + 1;
  if (interrupts >= 3) _exit(128 + number);  // the program does not react
}

void OnReload(int /*number*/) { reloads = 1; }

std::array<struct sigaction, kSignals.size()> previous;

}  // namespace

InterruptGuard::InterruptGuard(HangUp hang_up) {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    const bool reloads_on_it = kSignals[i] == SIGHUP && hang_up == HangUp::kReloads;
    struct sigaction action = {};
    action.sa_handler = reloads_on_it ? OnReload : OnSignal;
    sigemptyset(&action.sa_mask);
    sigaction(kSignals[i], nullptr, &previous[i]);
    const bool ignored = kSignals[i] == SIGHUP && !reloads_on_it && previous[i].sa_handler == SIG_IGN;
    if (!ignored) sigaction(kSignals[i], &action, nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

bool Interrupted() { return interrupts != 0; }
int LastSignal() { return last_signal; }
void ClearInterrupt() { interrupts = 0; }

bool TakeReload() {
  if (reloads == 0) return false;
  reloads = 0;  // cleared before the caller reloads, so that a later signal counts again
  return true;
}

}  // namespace moesaic::app
