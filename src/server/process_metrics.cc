#include "server/process_metrics.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

namespace moesaic::server {
namespace {

void Add(std::string& text, const char* name, const char* type, const char* help, double value) {
  text += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{0} {3}\n", name, help, type, value);
}

// Returns the machine's start time in seconds since 1970, or 0 if it is unknown.
double BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("btime ")) return std::stod(line.substr(6));
  }
  return 0;
}

}  // namespace

std::string ProcessMetricsText() {
  std::string text;
  std::ifstream file("/proc/self/stat");
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  // Field 2 is the name in parentheses, which may contain spaces. Field 3 follows the last parenthesis.
  const size_t end = all.rfind(')');
  if (end != std::string::npos) {
    std::istringstream fields(all.substr(end + 1));
    std::string state;
    fields >> state;
    double user = 0, system = 0, start = 0, virtual_bytes = 0, resident_pages = 0, value = 0;
    for (int field = 4; field <= 24 && fields >> value; ++field) {
      if (field == 14) user = value;
      if (field == 15) system = value;
      if (field == 22) start = value;
      if (field == 23) virtual_bytes = value;
      if (field == 24) resident_pages = value;
    }
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    Add(text, "process_cpu_seconds_total", "counter", "User and system CPU time", (user + system) / ticks);
    if (const double boot = BootTime(); boot > 0) {
      Add(text, "process_start_time_seconds", "gauge", "Start of the process, in seconds since 1970",
          boot + start / ticks);
    }
    Add(text, "process_virtual_memory_bytes", "gauge", "Virtual memory", virtual_bytes);
    Add(text, "process_resident_memory_bytes", "gauge", "Resident memory",
        resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  std::error_code error;
  const std::filesystem::directory_iterator folder("/proc/self/fd", error);
  if (!error) {
    const auto open =
        std::distance(folder, std::filesystem::directory_iterator()) - 1;  // without that of the listing
    Add(text, "process_open_fds", "gauge", "Open file descriptors", static_cast<double>(open));
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    Add(text, "process_max_fds", "gauge", "Most file descriptors that may be open",
        static_cast<double>(limit.rlim_cur));
  }
  return text;
}

}  // namespace moesaic::server
