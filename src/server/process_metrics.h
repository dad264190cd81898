// Reports the kernel's view of this process under the names of Prometheus' client libraries.
#pragma once

#include <string>

namespace moesaic::server {

/// Returns the process_* families in Prometheus' text format. Leaves out values that /proc does not have.
std::string ProcessMetricsText();

}  // namespace moesaic::server
