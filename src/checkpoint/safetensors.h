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
  size_t data_start = 0;                        // offset of the first tensor's bytes
};

/// Parses and validates the header of `bytes`, a whole file that must outlive the result. It checks types,
/// shapes, unique names, and offsets that are in range without overlap or gap. `file` prefixes every message.
StatusOr<Safetensors> ParseSafetensors(std::span<const std::byte> bytes, const std::string& file);

}  // namespace moesaic::checkpoint
