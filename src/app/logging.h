// The log of `moesaic serve`: text or JSON lines, on stderr or in a file that can be rotated.
#pragma once

#include <spdlog/logger.h>

#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/router.h"

namespace moesaic::app {

struct LogOptions {
  std::string format = "text";       ///< or "json": one object a line
  std::string level = "info";        ///< debug, info, warning, error
  std::string file;                  ///< appended to; empty: stderr
  std::string access = "no-health";  ///< all; no-health: without probes and polling that succeed; off
};

/// The logger, and the means to open its file again. Any thread.
struct ServerLog {
  std::shared_ptr<spdlog::logger> logger;
  /// Closes the file and opens its path, which another program may have moved away. Keeps the old file when
  /// the path cannot be opened. Empty where the log goes to stderr.
  std::function<Status()> reopen;
};

StatusOr<ServerLog> OpenLog(const LogOptions& options);

/// Logs answered and refused requests through `log`'s sinks; empty where the access log is off.
server::AccessLog MakeAccessLog(const LogOptions& options, const ServerLog& log);

}  // namespace moesaic::app
