// Names of processes, by which one process detects that another one of its host has ended.
#pragma once

#include <array>
#include <cstdint>

namespace moesaic::comm {

/// Trivially copyable without padding; sent to other processes.
struct ProcessName {
  std::array<char, 40> boot{};  // of the host; containers of one host share it; empty: unknown
  uint64_t pid_namespace = 0;   // namespace in which `pid` is valid; 0: unknown
  uint64_t pid = 0;
  uint64_t start = 0;  // time of its start, because process ids are used again; 0: unknown
};
static_assert(sizeof(ProcessName) == 64);

ProcessName OwnProcess();

/// Returns whether both processes are known to run on one host.
bool AreOnOneHost(const ProcessName& a, const ProcessName& b);

/// Returns whether the process is known to have ended, reaped or not. False for processes of other namespaces
/// or hosts.
bool HasEnded(const ProcessName& process);

}  // namespace moesaic::comm
