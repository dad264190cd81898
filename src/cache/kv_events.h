// Events about the contents of the radix tree.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace moesaic::cache {

/// Observes changes of the radix tree, with the meaning of vLLM's KV events: a publisher turns the calls into
/// messages. Called on the engine thread; must not block.
class KvObserver {
 public:
  virtual ~KvObserver() = default;
  /// Called when consecutive blocks `hashes` can be found from now on. `parent`: the block before them; none:
  /// they are the first of a sequence. tokens: [hashes.size() * kKvBlockTokens].
  virtual void Stored(std::span<const uint64_t> hashes, std::optional<uint64_t> parent,
                      std::span<const int32_t> tokens, std::string_view name_space) = 0;
  virtual void Removed(std::span<const uint64_t> hashes) = 0;
};

}  // namespace moesaic::cache
