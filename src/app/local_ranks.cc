#include "app/local_ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "app/progress.h"

namespace moesaic::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kWaitStep{10};
constexpr int kStopCheckMs = 500;         // maximum time between two searches for stopped children
constexpr size_t kLongestLine = 1 << 16;  // longer lines are divided

// The command line of this process.
StatusOr<std::vector<std::string>> OwnWords() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    words.emplace_back(text.c_str() + at);
    at += words.back().size() + 1;
  }
  if (words.empty()) return IoError("can't read /proc/self/cmdline, which ranks are started with");
  return words;
}

bool IsVariable(std::string_view entry, std::string_view other) {
  const std::string_view name = other.substr(0, other.find('=') + 1);
  return entry.starts_with(name);
}

// This process's environment with `added`, whose variables replace those of the same names.
std::vector<std::string> EnvironmentWith(const std::vector<std::string>& added) {
  std::vector<std::string> all = added;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool replaced = false;
    for (const std::string& other : added) replaced |= IsVariable(*entry, other);
    if (!replaced) all.emplace_back(*entry);
  }
  return all;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// The child between fork and exec: only calls that are safe there.
[[noreturn]] void BecomeRank(pid_t parent, int output, char* const* words, char* const* environment) {
  // The child ends when the parent does. Signals of the terminal go to the parent, which ends the job.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  setpgid(0, 0);
  const int empty = open("/dev/null", O_RDONLY);
  dup2(empty, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  execve("/proc/self/exe", words, environment);
  constexpr char kFailed[] = "can't start this program again\n";
  (void)!write(STDERR_FILENO, kFailed, sizeof(kFailed) - 1);
  _exit(127);
}

}  // namespace

LocalRanks::LocalRanks(Options options) : options_(std::move(options)) {}

StatusOr<std::unique_ptr<LocalRanks>> LocalRanks::Start(Options options) {
  ASSIGN_OR_RETURN(const std::vector<std::string> words, OwnWords());
  std::unique_ptr<LocalRanks> ranks(new LocalRanks(std::move(options)));
  for (int rank = 1; rank < ranks->options_.ranks; ++rank) RETURN_IF_ERROR(ranks->Spawn(rank, words));
  LocalRanks* const self = ranks.get();
  ranks->thread_ = std::thread([self] { self->Watch(); });
  return ranks;
}

LocalRanks::~LocalRanks() {
  Kill();
  if (thread_.joinable()) thread_.join();
  for (Child& child : children_) {
    if (child.pid > 0) waitpid(child.pid, nullptr, 0);  // no thread was started
    if (child.output >= 0) close(child.output);
  }
}

Status LocalRanks::Spawn(int rank, const std::vector<std::string>& words) {
  std::vector<std::string> variables = options_.environment;
  variables.push_back(fmt::format("MOESAIC_RANK={}", rank));
  variables.push_back(fmt::format("MOESAIC_WORLD_SIZE={}", options_.ranks));
  if (std::string progress = RankProgressVariable(); !progress.empty()) {
    variables.push_back(std::move(progress));
  }
  std::vector<std::string> environment = EnvironmentWith(variables), arguments = words;
  const std::vector<char*> environment_pointers = Pointers(environment), word_pointers = Pointers(arguments);
  std::array<int, 2> output{};
  if (pipe2(output.data(), O_CLOEXEC) != 0) {
    return ResourceExhausted("rank {}: can't open a pipe: {}", rank, std::strerror(errno));
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) BecomeRank(parent, output[1], word_pointers.data(), environment_pointers.data());
  close(output[1]);
  if (pid < 0) {
    close(output[0]);
    return ResourceExhausted("rank {}: can't start a process: {}", rank, std::strerror(errno));
  }
  children_.push_back({.rank = rank, .pid = pid, .output = output[0], .line = {}});
  return OkStatus();
}

// Forwards the output of children until all have closed it, which they do when they end.
void LocalRanks::Watch() {
  for (;;) {
    std::vector<pollfd> polled;
    std::vector<Child*> children;
    for (Child& child : children_) {
      if (child.output < 0) continue;
      polled.push_back({child.output, POLLIN, 0});
      children.push_back(&child);
    }
    if (children.empty()) return;
    const int ready = poll(polled.data(), polled.size(), kStopCheckMs);
    for (const Child* child : children) ReportStop(*child);
    if (ready < 0) continue;  // a signal
    for (size_t i = 0; i < children.size(); ++i) {
      if (polled[i].revents == 0) continue;
      std::array<char, 4096> buffer{};
      const ssize_t got = read(polled[i].fd, buffer.data(), buffer.size());
      if (got > 0) {
        Forward(*children[i], std::string_view(buffer.data(), got));
      } else if (got == 0 || errno != EINTR) {
        Reap(*children[i]);
      }
    }
  }
}

// A stopped rank makes the others wait until their time limit.
void LocalRanks::ReportStop(const Child& child) {
  siginfo_t changed{};
  const int options = WSTOPPED | WCONTINUED | WNOHANG;
  if (waitid(P_PID, static_cast<id_t>(child.pid), &changed, options) != 0 || changed.si_pid == 0) return;
  const std::string what =
      changed.si_code == CLD_CONTINUED
          ? "continues"
          : fmt::format("was stopped by signal {} ({})", changed.si_status, strsignal(changed.si_status));
  options_.output(fmt::format("rank {} (process {}) {}\n", child.rank, child.pid, what));
}

void LocalRanks::Forward(Child& child, std::string_view text) {
  {
    const std::lock_guard lock(mutex_);
    if (killed_) return;
  }
  for (const char letter : text) {
    if (letter != '\n') child.line += letter;
    if (letter != '\n' && child.line.size() < kLongestLine) continue;
    if (!ShowRankProgress(child.rank, child.line)) {
      options_.output(fmt::format("rank {}: {}\n", child.rank, child.line));
    }
    child.line.clear();
  }
}

void LocalRanks::Reap(Child& child) {
  if (!child.line.empty()) Forward(child, "\n");
  close(std::exchange(child.output, -1));
  const int pid = child.pid;
  siginfo_t ended{};
  while (waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
  }
  // The number is free for other processes from here on.
  const std::lock_guard lock(mutex_);
  int status = 0;
  waitpid(pid, &status, 0);
  child.pid = -1;
  if (!failure_.ok() || killed_) return;
  if (WIFSIGNALED(status)) {
    failure_ =
        absl::UnavailableError(fmt::format("rank {} (process {}) was killed by signal {} ({})", child.rank,
                                           pid, WTERMSIG(status), strsignal(WTERMSIG(status))));
  } else if (WEXITSTATUS(status) != 0) {
    failure_ = absl::UnavailableError(
        fmt::format("rank {} (process {}) exited with code {}", child.rank, pid, WEXITSTATUS(status)));
  }
}

Status LocalRanks::Failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

int LocalRanks::Running() const {
  const std::lock_guard lock(mutex_);
  int running = 0;
  for (const Child& child : children_) running += child.pid > 0 ? 1 : 0;
  return running;
}

Status LocalRanks::Wait(double limit_s) {
  const Clock::time_point end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_s));
  while (Running() > 0 && Clock::now() < end) std::this_thread::sleep_for(kWaitStep);
  {
    const std::lock_guard lock(mutex_);
    for (const Child& child : children_) {
      if (child.pid < 0 || !failure_.ok()) continue;
      failure_ = absl::DeadlineExceededError(fmt::format(
          "rank {} (process {}) did not end within {} s, and was killed", child.rank, child.pid, limit_s));
    }
  }
  KillRunning();
  while (Running() > 0) std::this_thread::sleep_for(kWaitStep);
  return Failure();
}

void LocalRanks::KillRunning() {
  const std::lock_guard lock(mutex_);
  for (const Child& child : children_) {
    if (child.pid > 0) kill(child.pid, SIGKILL);
  }
}

void LocalRanks::KillRank(int rank) {
  const std::lock_guard lock(mutex_);
  for (const Child& child : children_) {
    if (child.rank == rank && child.pid > 0) kill(child.pid, SIGKILL);
  }
}

void LocalRanks::Kill() {
  {
    const std::lock_guard lock(mutex_);
    killed_ = true;
  }
  KillRunning();
}

}  // namespace moesaic::app
