#include "proxy/index/keys.h"

#include <cstring>
#include <string>

#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

std::span<const std::byte, 192> SecretOf(const Zone& zone) { return zone.At<ZoneHeader>(0)->secret; }

}  // namespace

KeyMaker::KeyMaker(const Zone& zone) : hasher_(SecretOf(zone)) {}

uint64_t KeyMaker::Root(const KeyNamespace& name, uint32_t block_size) const {
  // Lengths separate the parts, so that no salt looks like another salt with an adapter.
  std::string text = fmt::format("{} {} {} ", block_size, name.salt.size(), name.adapter.size());
  text.append(name.salt).append(name.adapter);
  return hasher_.Root(text);
}

uint64_t KeyMaker::Next(uint64_t parent, std::span<const int32_t> tokens, std::string_view extra) const {
  const uint64_t key = hasher_.Next(parent, tokens);
  if (extra.empty()) return key;
  std::string text(sizeof key, '\0');
  std::memcpy(text.data(), &key, sizeof key);
  return hasher_.Root(text.append(extra));
}

void KeyMaker::Append(std::span<const int32_t> tokens, const KeyNamespace& name, uint32_t block_size,
                      std::vector<uint64_t>& keys) const {
  uint64_t parent = Root(name, block_size);
  keys.reserve(keys.size() + tokens.size() / block_size);
  for (size_t i = 0; i + block_size <= tokens.size(); i += block_size) {
    parent = Next(parent, tokens.subspan(i, block_size));
    keys.push_back(parent);
  }
}

}  // namespace moesaic::proxy
