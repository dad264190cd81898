#include "proxy/index/keys.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

std::span<const std::byte, 192> SecretOf(const Zone& zone) { return zone.At<ZoneHeader>(0)->secret; }

uint64_t HashOf(const void* bytes, size_t size, const std::array<std::byte, 192>& secret) {
  return XXH3_64bits_withSecret(bytes, size, secret.data(), secret.size());
}

// Hash of one block without its parent. The compiler knows the length of vLLM's default block.
uint64_t HashOfTokens(std::span<const int32_t> tokens, const std::array<std::byte, 192>& secret) {
  constexpr size_t kCommonTokens = 16;
  if (tokens.size() == kCommonTokens) return HashOf(tokens.data(), kCommonTokens * sizeof(int32_t), secret);
  return HashOf(tokens.data(), tokens.size_bytes(), secret);
}

uint64_t Chained(uint64_t parent, uint64_t block, const std::array<std::byte, 192>& secret) {
  const std::array<uint64_t, 2> pair = {parent, block};
  return HashOf(pair.data(), sizeof pair, secret);
}

}  // namespace

KeyMaker::KeyMaker(std::span<const std::byte, 192> secret) { std::ranges::copy(secret, secret_.begin()); }

KeyMaker::KeyMaker(const Zone& zone) : KeyMaker(SecretOf(zone)) {}

uint64_t KeyMaker::Root(const KeyNamespace& name, uint32_t block_size) const {
  // Lengths separate the parts, so that no salt looks like another salt with an adapter.
  std::string text = fmt::format("{} {} {} ", block_size, name.salt.size(), name.adapter.size());
  text.append(name.salt).append(name.adapter);
  return HashOf(text.data(), text.size(), secret_);
}

uint64_t KeyMaker::Next(uint64_t parent, std::span<const int32_t> tokens, std::string_view extra) const {
  const uint64_t key = Chained(parent, HashOfTokens(tokens, secret_), secret_);
  if (extra.empty()) return key;
  return Chained(key, HashOf(extra.data(), extra.size(), secret_), secret_);
}

void KeyMaker::Append(std::span<const int32_t> tokens, const KeyNamespace& name, uint32_t block_size,
                      std::vector<uint64_t>& keys) const {
  uint64_t parent = Root(name, block_size);
  const size_t blocks = tokens.size() / block_size, before = keys.size();
  keys.resize(before + blocks);
  for (size_t i = 0; i < blocks; ++i) {
    parent = Chained(parent, HashOfTokens(tokens.subspan(i * block_size, block_size), secret_), secret_);
    keys[before + i] = parent;
  }
}

}  // namespace moesaic::proxy
