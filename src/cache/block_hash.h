// Names of KV blocks: a keyed hash of a block's tokens and of all that stands before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace moesaic::cache {

/// XXH3 under a secret of 192 random bytes: who does not know it can neither make two blocks collide nor tell
/// from a hash what a block holds. A hash only finds candidates; equality is decided by tokens.
class BlockHasher {
 public:
  /// A new secret. `bits` of each hash are kept; fewer than 64 let tests make collisions.
  explicit BlockHasher(int bits = 64);

  /// What stands before the first block of namespace `name`.
  uint64_t Root(std::string_view name) const;
  /// Of the block that holds `tokens` behind the block of hash `parent`. tokens: [kKvBlockTokens].
  uint64_t Next(uint64_t parent, std::span<const int32_t> tokens) const;

 private:
  std::array<std::byte, 192> secret_;
  uint64_t mask_;
};

}  // namespace moesaic::cache
