// Keyed hashes of token blocks and of all blocks before them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace moesaic::prefix {

/// hash = H(hash of the block before, H(tokens)), with H = 64-bit XXH3 with a secret of 192 random bytes. The
/// tokens of different blocks are hashed independently, so that the processor overlaps them; only the hash of
/// 16 bytes waits for the block before.
///
/// Without the secret no caller can construct two blocks that collide, or learn from a hash the tokens of a
/// block. A hash only finds candidates; tokens decide equality.
class KeyedHasher {
 public:
  /// Draws a new secret. Keeps `bits` of each hash; tests pass fewer than 64 to provoke collisions.
  explicit KeyedHasher(int bits = 64);
  /// Uses a secret that several processes share.
  explicit KeyedHasher(std::span<const std::byte, 192> secret);

  /// Returns the hash of the position before the first block of namespace `name`.
  uint64_t Root(std::string_view name) const;
  /// Returns the hash of the block of `tokens` that follows the block with hash `parent`.
  uint64_t Next(uint64_t parent, std::span<const int32_t> tokens) const;
  /// Returns the hash of a block that has other content than tokens too, such as an image. `block` is the
  /// hash of its tokens, by Next.
  uint64_t AddContent(uint64_t block, std::string_view content) const;
  /// Sets `hashes` to those of the adjacent blocks of `tokens`, each of `block_tokens` tokens. The first one
  /// follows the block with hash `parent`.
  void NextBlocks(uint64_t parent, std::span<const int32_t> tokens, size_t block_tokens,
                  std::span<uint64_t> hashes) const;

 private:
  std::array<std::byte, 192> secret_;
  uint64_t mask_;
};

}  // namespace moesaic::prefix
