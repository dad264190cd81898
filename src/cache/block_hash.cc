#include "cache/block_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <random>

#include "base/check.h"
#include "cache/kv_pool.h"

namespace moesaic::cache {

static_assert(sizeof(std::array<std::byte, 192>) >= XXH3_SECRET_SIZE_MIN);

BlockHasher::BlockHasher(int bits) : mask_(bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1) {
  std::random_device device;
  for (size_t i = 0; i < secret_.size(); i += sizeof(unsigned)) {
    const unsigned word = device();
    std::memcpy(&secret_[i], &word, sizeof(word));
  }
}

uint64_t BlockHasher::Root(std::string_view name) const {
  return XXH3_64bits_withSecret(name.data(), name.size(), secret_.data(), secret_.size()) & mask_;
}

uint64_t BlockHasher::Next(uint64_t parent, std::span<const int32_t> tokens) const {
  MOESAIC_CHECK_EQ(tokens.size(), size_t{kKvBlockTokens});
  std::array<std::byte, sizeof(parent) + kKvBlockTokens * sizeof(int32_t)> input;
  std::memcpy(input.data(), &parent, sizeof(parent));
  std::memcpy(&input[sizeof(parent)], tokens.data(), tokens.size_bytes());
  return XXH3_64bits_withSecret(input.data(), input.size(), secret_.data(), secret_.size()) & mask_;
}

}  // namespace moesaic::cache
