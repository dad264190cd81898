// The log of `moesaic serve`: text or JSON lines, to stderr or a file that supports rotation.
#pragma once

#include <spdlog/logger.h>

#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/router.h"

namespace moesaic::app {

struct LogOptions {
  std::string format = "text";       ///< text, or json: one object per line
  std::string level = "info";        ///< debug, info, warning, error
  std::string file;                  ///< file to append to; empty: stderr
  std::string access = "no-health";  ///< all; no-health: without successful probes and polling; off
};

/// The logger and a function that reopens its file. Thread-safe.
struct ServerLog {
  std::shared_ptr<spdlog::logger> logger;
  /// Closes the file and opens its path again, after another program has moved the file. Keeps the old file
  /// if the path cannot be opened. Empty if the log goes to stderr.
  std::function<Status()> reopen;
};

StatusOr<ServerLog> OpenLog(const LogOptions& options);

/// Returns a logger of answered and rejected requests that writes to `log`'s sinks. Empty if the access log
/// is off.
server::AccessLog MakeAccessLog(const LogOptions& options, const ServerLog& log);

}  // namespace moesaic::app
