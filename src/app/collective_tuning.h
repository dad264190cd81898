// Reads measured times of collectives from a file.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace moesaic::comm {
class TuningTable;
}

namespace moesaic::app {

/// Reads the table that comm_all_reduce_bench --tune writes, from a file or standard input ("-"). Null if
/// `path` is empty. InvalidArgument names the faulty entry.
StatusOr<std::shared_ptr<const comm::TuningTable>> ReadCollectiveTuning(const std::string& path);

}  // namespace moesaic::app
