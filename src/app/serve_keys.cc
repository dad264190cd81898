#include "app/serve_keys.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <iterator>
#include <utility>

#include "text/file.h"

namespace moesaic::app {

StatusOr<std::vector<server::KeyEntry>> ReadKeys(const KeyFlags& flags) {
  std::vector<server::KeyEntry> entries;
  for (size_t i = 0; i < flags.api_keys.size(); ++i) {
    entries.push_back(
        server::UnnamedKey(fmt::format("api-key-{}", i + 1), flags.api_keys[i], /*admin=*/false));
  }
  for (size_t i = 0; i < flags.admin_keys.size(); ++i) {
    entries.push_back(
        server::UnnamedKey(fmt::format("admin-key-{}", i + 1), flags.admin_keys[i], /*admin=*/true));
  }
  if (!flags.file.empty()) {
    const auto text = text::ReadFile(flags.file);
    if (!text.ok()) return Annotate(text.status(), "--api-key-file");
    auto parsed = server::ParseKeyFile(*text);
    if (!parsed.ok()) return Annotate(parsed.status(), fmt::format("--api-key-file {}", flags.file));
    std::move(parsed->begin(), parsed->end(), std::back_inserter(entries));
    struct stat info {};
    if (stat(flags.file.c_str(), &info) == 0 && (info.st_mode & S_IROTH) != 0) {
      spdlog::warn("--api-key-file {}: every user of this machine can read the keys; run chmod o-r on it",
                   flags.file);
    }
  }
  RETURN_IF_ERROR(server::CheckKeys(entries));
  return entries;
}

}  // namespace moesaic::app
