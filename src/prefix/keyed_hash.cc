#include "prefix/keyed_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <random>

#include "base/check.h"

namespace moesaic::prefix {
namespace {

using Secret = std::array<std::byte, 192>;

uint64_t HashOf(const void* bytes, size_t size, const Secret& secret) {
  return XXH3_64bits_withSecret(bytes, size, secret.data(), secret.size());
}

// Hash of one block without its parent. The compiler knows the length of this engine's block, and of vLLM's
// default block.
uint64_t HashOfTokens(std::span<const int32_t> tokens, const Secret& secret) {
  constexpr size_t kEngineTokens = 64, kCommonTokens = 16;
  if (tokens.size() == kEngineTokens) return HashOf(tokens.data(), kEngineTokens * sizeof(int32_t), secret);
  if (tokens.size() == kCommonTokens) return HashOf(tokens.data(), kCommonTokens * sizeof(int32_t), secret);
  return HashOf(tokens.data(), tokens.size_bytes(), secret);
}

uint64_t Chained(uint64_t parent, uint64_t block, const Secret& secret) {
  const std::array<uint64_t, 2> pair = {parent, block};
  return HashOf(pair.data(), sizeof(pair), secret);
}

}  // namespace

static_assert(sizeof(Secret) >= XXH3_SECRET_SIZE_MIN);

KeyedHasher::KeyedHasher(int bits) : mask_(bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1) {
  std::random_device device;
  for (size_t i = 0; i < secret_.size(); i += sizeof(unsigned)) {
    const unsigned word = device();
    std::memcpy(&secret_[i], &word, sizeof(word));
  }
}

KeyedHasher::KeyedHasher(std::span<const std::byte, 192> secret) : mask_(~uint64_t{0}) {
  std::memcpy(secret_.data(), secret.data(), secret.size());
}

uint64_t KeyedHasher::Root(std::string_view name) const {
  return HashOf(name.data(), name.size(), secret_) & mask_;
}

uint64_t KeyedHasher::Next(uint64_t parent, std::span<const int32_t> tokens) const {
  return Chained(parent, HashOfTokens(tokens, secret_), secret_) & mask_;
}

uint64_t KeyedHasher::AddContent(uint64_t block, std::string_view content) const {
  return Chained(block, HashOf(content.data(), content.size(), secret_), secret_) & mask_;
}

void KeyedHasher::NextBlocks(uint64_t parent, std::span<const int32_t> tokens, size_t block_tokens,
                             std::span<uint64_t> hashes) const {
  MOESAIC_CHECK_LE(hashes.size() * block_tokens, tokens.size());
  for (uint64_t& hash : hashes) {
    parent = hash = Chained(parent, HashOfTokens(tokens.first(block_tokens), secret_), secret_) & mask_;
    tokens = tokens.subspan(block_tokens);
  }
}

}  // namespace moesaic::prefix
