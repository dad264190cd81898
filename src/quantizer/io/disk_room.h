// Checks the free disk space before a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Returns the number of bytes that a run has yet to write to `folder`. These are the missing parts of
/// `shards` and two states of `state_bytes` (the last one and the next one), minus the states that exist.
int64_t BytesToWrite(const std::string& folder, const std::vector<Shard>& shards, int64_t state_bytes);

/// Fails if the disk has less free space, and states both numbers.
Status CheckDisk(const std::string& folder, const std::vector<Shard>& shards, int64_t state_bytes);

}  // namespace moesaic::quantizer
