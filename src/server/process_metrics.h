// The process as the kernel sees it, under the names that Prometheus' client libraries use.
#pragma once

#include <string>

namespace moesaic::server {

/// process_* families in Prometheus' text format. A value that /proc does not have is left out.
std::string ProcessMetricsText();

}  // namespace moesaic::server
