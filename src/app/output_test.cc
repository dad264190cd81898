#include "app/output.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "app/interrupt.h"

namespace moesaic::app {
namespace {

// Waits until standard output, a pipe, takes no more bytes: its writer is blocked.
void WaitUntilFull() {
  pollfd output = {.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  while (poll(&output, 1, 0) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(Output, SignalsDoNotLoseOutput) {
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) {};
  sigemptyset(&action.sa_mask);
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int standard = dup(STDOUT_FILENO);
  ASSERT_EQ(dup2(ends[1], STDOUT_FILENO), STDOUT_FILENO);
  close(ends[1]);

  const std::string text(1 << 20, 'x');  // more than a pipe holds, so that the write blocks
  std::string received;
  std::thread reader([&, writer = pthread_self()] {
    WaitUntilFull();
    for (int i = 0; i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      pthread_kill(writer, SIGUSR1);
    }
    char piece[4096];
    for (ssize_t got; (got = read(ends[0], piece, sizeof(piece))) > 0;) received.append(piece, got);
  });
  WriteOutput(text);
  const Status status = FlushOutput();
  dup2(standard, STDOUT_FILENO);  // closes the pipe, so that the reader ends
  close(standard);
  reader.join();
  close(ends[0]);
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(received == text) << received.size() << " bytes of " << text.size();
}

// Runs in a process of its own, because a failure of standard output is permanent.
TEST(OutputDeathTest, CtrlCEndsABlockedWrite) {
  const auto write_blocked = [] {
    const InterruptGuard guard;
    int ends[2];
    if (pipe(ends) != 0 || dup2(ends[1], STDOUT_FILENO) != STDOUT_FILENO) std::_Exit(1);
    std::thread user([writer = pthread_self()] {
      WaitUntilFull();
      pthread_kill(writer, SIGINT);
    });
    WriteOutput(std::string(1 << 20, 'x'));
    const Status status = FlushOutput();
    user.join();
    std::_Exit(status.code() == StatusCode::kCancelled ? 3 : 2);
  };
  EXPECT_EXIT(write_blocked(), testing::ExitedWithCode(3), "");
}

}  // namespace
}  // namespace moesaic::app
