#include "comm/transport/process_name.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace moesaic::comm {
namespace {

struct ProcessState {
  char state = 0;
  uint64_t start = 0;
};

// Reads /proc/PID/stat, see proc(5); empty if it cannot be read.
std::optional<ProcessState> StateOfProcess(uint64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const size_t name_end = line.rfind(')');  // the name may have spaces
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessState found;
  fields >> found.state;  // field 3
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> found.start;
  if (!fields) return std::nullopt;
  return found;
}

uint64_t PidNamespace() {
  struct stat info {};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

std::string BootOfHost() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

}  // namespace

ProcessName OwnProcess() {
  ProcessName own;
  const std::string boot = BootOfHost();
  std::copy_n(boot.begin(), std::min(boot.size(), own.boot.size()), own.boot.begin());
  own.pid_namespace = PidNamespace();
  own.pid = static_cast<uint64_t>(getpid());
  if (const auto state = StateOfProcess(own.pid)) own.start = state->start;
  return own;
}

// Where the host's boot cannot be read, it is empty on all hosts.
bool AreOnOneHost(const ProcessName& a, const ProcessName& b) { return a.boot[0] != 0 && a.boot == b.boot; }

bool HasEnded(const ProcessName& process) {
  static const ProcessName own = OwnProcess();
  if (process.start == 0 || !AreOnOneHost(process, own) || process.pid_namespace != own.pid_namespace)
    return false;
  if (kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return true;
  const auto found = StateOfProcess(process.pid);
  return found && (found->start != process.start || found->state == 'Z' || found->state == 'X');
}

}  // namespace moesaic::comm
