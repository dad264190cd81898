// The safetensors container: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
// https://github.com/huggingface/safetensors#format
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // the reference implementation's limit

struct Safetensors {
  std::vector<TensorEntry> tensors;             // in the order of their offsets
  std::map<std::string, std::string> metadata;  // __metadata__
  size_t data_start = 0;                        // where the tensors' bytes begin
};

/// Parses the header of `bytes`, a whole file that must outlive the result, and checks it: types, shapes,
/// offsets in range, without overlap or gap, names once only. `file` stands in front of every message.
StatusOr<Safetensors> ParseSafetensors(std::span<const std::byte> bytes, const std::string& file);

}  // namespace moesaic::checkpoint
