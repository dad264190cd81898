// Tells others what the cache holds.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace moesaic::cache {

/// What changes in the tree, as it changes, with the same meaning as vLLM's KV events: a publisher turns
/// these calls into messages. Called on the engine thread; must not block.
class KvObserver {
 public:
  virtual ~KvObserver() = default;
  /// Blocks `hashes`, one behind the other, can be found from now on. `parent`: the block before them, none
  /// for the first of a sequence. tokens: [hashes.size() * kKvBlockTokens].
  virtual void Stored(std::span<const uint64_t> hashes, std::optional<uint64_t> parent,
                      std::span<const int32_t> tokens, std::string_view name_space) = 0;
  virtual void Removed(std::span<const uint64_t> hashes) = 0;
};

}  // namespace moesaic::cache
