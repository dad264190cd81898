#include "prefix/keyed_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <random>
#include <vector>

namespace moesaic::prefix {
namespace {

constexpr size_t kCommonTokens = 64;     // per block of this engine
constexpr size_t kMaxStackTokens = 256;  // larger blocks are hashed from the heap

}  // namespace

static_assert(sizeof(std::array<std::byte, 192>) >= XXH3_SECRET_SIZE_MIN);

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
  return XXH3_64bits_withSecret(name.data(), name.size(), secret_.data(), secret_.size()) & mask_;
}

uint64_t KeyedHasher::Next(uint64_t parent, std::span<const int32_t> tokens) const {
  if (tokens.size() == kCommonTokens) {  // the compiler knows the length
    std::array<std::byte, sizeof(parent) + kCommonTokens * sizeof(int32_t)> input;
    std::memcpy(input.data(), &parent, sizeof(parent));
    std::memcpy(&input[sizeof(parent)], tokens.data(), kCommonTokens * sizeof(int32_t));
    return XXH3_64bits_withSecret(input.data(), input.size(), secret_.data(), secret_.size()) & mask_;
  }
  std::array<std::byte, sizeof(parent) + kMaxStackTokens * sizeof(int32_t)> small;
  std::vector<std::byte> large(tokens.size() > kMaxStackTokens ? sizeof(parent) + tokens.size_bytes() : 0);
  std::byte* const input = large.empty() ? small.data() : large.data();
  std::memcpy(input, &parent, sizeof(parent));
  std::memcpy(input + sizeof(parent), tokens.data(), tokens.size_bytes());
  const size_t bytes = sizeof(parent) + tokens.size_bytes();
  return XXH3_64bits_withSecret(input, bytes, secret_.data(), secret_.size()) & mask_;
}

}  // namespace moesaic::prefix
