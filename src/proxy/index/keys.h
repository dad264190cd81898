// Block keys: our own names of token blocks, the same for every engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "prefix/keyed_hash.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

/// Everything that separates two equal token sequences.
struct KeyNamespace {
  std::string_view salt;     ///< cache_salt of the request
  std::string_view adapter;  ///< LoRA name
};

/// Computes block keys: those of prefix::KeyedHasher with the secret of the zone. Only full blocks have keys.
class KeyMaker {
 public:
  explicit KeyMaker(const Zone& zone);
  explicit KeyMaker(std::span<const std::byte, 192> secret);

  /// Key of the position before the first block.
  uint64_t Root(const KeyNamespace& name, uint32_t block_size) const;
  /// Key of the block `tokens` after `parent`. `extra` separates blocks with other content than tokens, such
  /// as images.
  uint64_t Next(uint64_t parent, std::span<const int32_t> tokens, std::string_view extra = {}) const {
    const uint64_t key = hasher_.Next(parent, tokens);
    return extra.empty() ? key : hasher_.AddContent(key, extra);
  }
  /// Appends the keys of all full blocks of `tokens`.
  void Append(std::span<const int32_t> tokens, const KeyNamespace& name, uint32_t block_size,
              std::vector<uint64_t>& keys) const;

 private:
  prefix::KeyedHasher hasher_;
};

}  // namespace moesaic::proxy
