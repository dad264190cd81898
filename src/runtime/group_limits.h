// Limits that Linux control groups (versions 2 and 1) set for this process.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::runtime {

/// Reads the limits of the process's control group and of all groups that contain it. The smallest one holds.
class GroupLimits {
 public:
  GroupLimits() = default;
  /// For tests: other files than /proc/self/cgroup, and other folders than /sys/fs/cgroup.
  GroupLimits(std::string groups_file, std::string mount)
      : groups_file_(std::move(groups_file)), mount_(std::move(mount)) {}

  /// Returns the limit of CPU time, in cores; 0: no limit.
  double Cores() const;
  /// Returns the part of `bytes` that the groups still allow. Cached file pages do not count as used.
  int64_t AvailableMemory(int64_t bytes) const;

 private:
  std::vector<std::string> Folders(const std::string& controller) const;

  const std::string groups_file_ = "/proc/self/cgroup", mount_ = "/sys/fs/cgroup";
};

/// Returns the first line of a kernel file, or "".
std::string ReadLine(const std::string& path);

/// Parses lines "key value [unit]" of a kernel file. Returns an empty map if the file cannot be read.
std::map<std::string, int64_t> ReadCounts(const std::string& path);

}  // namespace moesaic::runtime
