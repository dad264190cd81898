// Whether the disk has room for what a run is to write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Bytes that a run has yet to write to `folder`: of `shards` what is not there, and two states of
/// `state_bytes`, one of which is on its way, less the states that are there.
int64_t BytesToWrite(const std::string& folder, const std::vector<Shard>& shards, int64_t state_bytes);

/// Refuses a disk that has less room, with both numbers.
Status CheckDisk(const std::string& folder, const std::vector<Shard>& shards, int64_t state_bytes);

}  // namespace moesaic::quantizer
