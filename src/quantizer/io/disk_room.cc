#include "quantizer/io/disk_room.h"

#include <algorithm>
#include <filesystem>

#include "quantizer/io/hidden_state.h"
#include "quantizer/io/machine_rates.h"

namespace moesaic::quantizer {

int64_t BytesToWrite(const std::string& folder, const std::vector<Shard>& shards, int64_t state_bytes) {
  int64_t missing = 2 * state_bytes - std::min(StateBytesIn(folder), 2 * state_bytes);
  for (const Shard& shard : shards) {
    std::error_code error;
    const uintmax_t there = std::filesystem::file_size(std::filesystem::path(folder) / shard.file, error);
    missing += shard.bytes - (error ? 0 : std::min<int64_t>(static_cast<int64_t>(there), shard.bytes));
  }
  return missing;
}

Status CheckDisk(const std::string& folder, const std::vector<Shard>& shards, int64_t state_bytes) {
  const int64_t missing = BytesToWrite(folder, shards, state_bytes), free = FreeBytes(folder);
  if (free < 0 || free >= missing) return OkStatus();
  return ResourceExhausted("{}: the disk has {} bytes free, but the run must write {} more", folder, free,
                           missing);
}

}  // namespace moesaic::quantizer
