#include "runtime/group_limits.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace moesaic::runtime {
namespace {

// Files of a group's memory, for versions 2 and 1. Version 2 has no name of a controller.
struct MemoryFiles {
  const char *controller, *limit, *usage, *inactive, *active;
};
constexpr MemoryFiles kMemoryFiles[] = {
    {"", "memory.max", "memory.current", "inactive_file", "active_file"},
    {"memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"}};

}  // namespace

std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::map<std::string, int64_t> ReadCounts(const std::string& path) {
  std::ifstream file(path);
  std::map<std::string, int64_t> counts;
  std::string key, unit;
  int64_t value = 0;
  while (file >> key >> value) {
    counts[key] = value;
    std::getline(file, unit);
  }
  return counts;
}

// Returns the folder of the process's group and of those that contain it, nearest first. The last one is the
// mount's root: in a container it is the process's own group, and the path in the file may not exist.
std::vector<std::string> GroupLimits::Folders(const std::string& controller) const {
  const std::string root = controller.empty() ? mount_ : mount_ + "/" + controller;
  std::vector<std::string> folders;
  std::ifstream file(groups_file_);
  for (std::string line; std::getline(file, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers.find("," + controller + ",") == std::string::npos) continue;
    std::string path = line.substr(second + 1);
    while (path.size() > 1 && path.front() == '/') {
      folders.push_back(root + path);
      path.resize(path.rfind('/'));
    }
  }
  folders.push_back(root);
  return folders;
}

double GroupLimits::Cores() const {
  double cores = std::numeric_limits<double>::infinity();
  for (const std::string& folder : Folders("")) {
    std::istringstream line(ReadLine(folder + "/cpu.max"));
    double quota = 0, period = 0;
    // "max 100000" fails to parse: no limit
    if (line >> quota >> period && period > 0) cores = std::min(cores, quota / period);
  }
  for (const std::string& folder : Folders("cpu")) {
    std::istringstream quota_line(ReadLine(folder + "/cpu.cfs_quota_us"));
    std::istringstream period_line(ReadLine(folder + "/cpu.cfs_period_us"));
    double quota = 0, period = 0;
    if (quota_line >> quota && period_line >> period && quota > 0 && period > 0)
      cores = std::min(cores, quota / period);
  }
  return cores < std::numeric_limits<double>::infinity() ? cores : 0;
}

int64_t GroupLimits::AvailableMemory(int64_t bytes) const {
  for (const MemoryFiles& files : kMemoryFiles) {
    for (const std::string& folder : Folders(files.controller)) {
      int64_t limit = 0, usage = 0;
      // No such file, or "max": no limit. Version 1 writes "no limit" as a number near the largest one.
      if (!(std::istringstream(ReadLine(folder + "/" + files.limit)) >> limit)) continue;
      if (!(std::istringstream(ReadLine(folder + "/" + files.usage)) >> usage)) continue;
      // Cached file pages are reclaimed on demand. They are read after the usage and may exceed it by then.
      std::map<std::string, int64_t> counts = ReadCounts(folder + "/memory.stat");
      const int64_t held = std::max<int64_t>(usage - counts[files.inactive] - counts[files.active], 0);
      bytes = std::min(bytes, std::max<int64_t>(limit - held, 0));
    }
  }
  return bytes;
}

}  // namespace moesaic::runtime
