#include "comm/transport/process_name.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace moesaic::comm {
namespace {

TEST(ProcessNameTest, AProcessHasEndedWhenItIsKilledNotWhenItIsStopped) {
  ProcessName name = OwnProcess();
  EXPECT_FALSE(HasEnded(name));
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    const ProcessName own = OwnProcess();
    (void)!write(pipe_ends[1], &own, sizeof(own));
    for (;;) pause();
  }
  ASSERT_EQ(read(pipe_ends[0], &name, sizeof(name)), static_cast<ssize_t>(sizeof(name)));
  EXPECT_EQ(name.pid, static_cast<uint64_t>(child));
  EXPECT_FALSE(HasEnded(name));
  int state = 0;
  kill(child, SIGSTOP);
  waitpid(child, &state, WUNTRACED);
  EXPECT_FALSE(HasEnded(name));
  kill(child, SIGKILL);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);  // it is not reaped
  EXPECT_TRUE(HasEnded(name));
  waitpid(child, &state, 0);
  EXPECT_TRUE(HasEnded(name));
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(ProcessNameTest, AProcessHasEndedIfItsIdBelongsToAnother) {
  ProcessName name = OwnProcess();
  ++name.start;
  EXPECT_TRUE(HasEnded(name));
}

TEST(ProcessNameTest, ProcessesOfOtherHostsAndNamespacesAreNotKnownToHaveEnded) {
  ProcessName host = OwnProcess(), container = OwnProcess(), unknown = OwnProcess();
  host.boot[0] ^= 1;
  ++container.pid_namespace;
  host.pid = container.pid = unknown.pid = 1U << 30;  // above the largest one
  unknown.start = 0;
  EXPECT_FALSE(HasEnded(host));
  EXPECT_FALSE(HasEnded(container));
  EXPECT_FALSE(HasEnded(unknown));
}

// Sandboxes without the host's boot must not take the processes of other hosts for their own.
TEST(ProcessNameTest, ProcessesOfUnknownHostsAreNotOnTheSameHost) {
  ProcessName unknown = OwnProcess();
  unknown.boot.fill(0);
  EXPECT_TRUE(AreOnOneHost(OwnProcess(), OwnProcess()));
  EXPECT_FALSE(AreOnOneHost(unknown, unknown));
  EXPECT_FALSE(AreOnOneHost(unknown, OwnProcess()));
}

}  // namespace
}  // namespace moesaic::comm
