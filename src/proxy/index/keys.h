// Block keys: our own names of token blocks, the same for every engine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "proxy/state/zone.h"

namespace moesaic::proxy {

/// Everything that separates two equal token sequences.
struct KeyNamespace {
  std::string_view salt;     ///< cache_salt of the request
  std::string_view adapter;  ///< LoRA name
};

/// Computes block keys: key = H(parent key, H(tokens)), with H = 64-bit XXH3 and the secret of the zone. The
/// tokens of different blocks are hashed independently, so that the processor overlaps them; only the hash of
/// 16 bytes waits for the block before. Only full blocks have keys. Without the secret no client can
/// construct two prompts whose keys collide.
class KeyMaker {
 public:
  explicit KeyMaker(const Zone& zone);
  explicit KeyMaker(std::span<const std::byte, 192> secret);

  /// Key of the position before the first block.
  uint64_t Root(const KeyNamespace& name, uint32_t block_size) const;
  /// Key of the block `tokens` after `parent`. `extra` separates blocks with other content than tokens, such
  /// as images.
  uint64_t Next(uint64_t parent, std::span<const int32_t> tokens, std::string_view extra = {}) const;
  /// Appends the keys of all full blocks of `tokens`.
  void Append(std::span<const int32_t> tokens, const KeyNamespace& name, uint32_t block_size,
              std::vector<uint64_t>& keys) const;

 private:
  std::array<std::byte, 192> secret_;
};

}  // namespace moesaic::proxy
