#include "app/interrupt.h"

#include <unistd.h>

#include <csignal>

namespace moesaic::app {
namespace {

volatile std::sig_atomic_t interrupts = 0;

void OnSignal(int number) {
  interrupts = interrupts + 1;
  if (interrupts >= 3) _exit(128 + number);  // the program does not answer: let the user out
}

struct sigaction previous_int, previous_term;

}  // namespace

InterruptGuard::InterruptGuard() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &previous_int);
  sigaction(SIGTERM, &action, &previous_term);
}

InterruptGuard::~InterruptGuard() {
  sigaction(SIGINT, &previous_int, nullptr);
  sigaction(SIGTERM, &previous_term, nullptr);
}

bool Interrupted() { return interrupts != 0; }
void ClearInterrupt() { interrupts = 0; }

}  // namespace moesaic::app
