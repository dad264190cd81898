// KV events of engines in one form for vLLM, SGLang and this project's engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moesaic::proxy {

/// Keys of a block that are not tokens: LoRA name, hashes of images, cache salt. Encoded as one string.
using ExtraKeys = std::string;

struct KvEvent {
  enum class Type : uint8_t { kStored, kRemoved, kCleared, kOther };

  Type type = Type::kOther;
  std::vector<uint64_t> block_hashes;  ///< engine's hashes; 32-byte hashes are folded to 64 bits
  std::optional<uint64_t> parent;      ///< none: the first block is the first of a sequence
  std::vector<int32_t> tokens;         ///< [block_hashes.size() * block_size]
  uint32_t block_size = 0;
  std::optional<int64_t> lora_id;
  std::string lora_name;
  std::string medium;                 ///< "GPU", "CPU", "DISK" ...; empty: not given
  std::string cache_salt;             ///< from SGLang's metadata or from the first block's extra keys
  std::vector<ExtraKeys> extra_keys;  ///< per block without salt and LoRA name; empty: none has any
  std::optional<int64_t> group;       ///< KV group of hybrid models
  std::string spec_kind;              ///< "full_attention", "sliding_window" ...; empty: not given
};

struct KvBatch {
  double time = 0;  ///< seconds since 1970, by the engine's clock
  std::vector<KvEvent> events;
  std::optional<int64_t> dp_rank;
};

}  // namespace moesaic::proxy
