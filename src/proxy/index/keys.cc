#include "proxy/index/keys.h"

#include <string>

#include "proxy/state/layout.h"

namespace moesaic::proxy {

KeyMaker::KeyMaker(std::span<const std::byte, 192> secret) : hasher_(secret) {}

KeyMaker::KeyMaker(const Zone& zone) : KeyMaker(zone.At<ZoneHeader>(0)->secret) {}

uint64_t KeyMaker::Root(const KeyNamespace& name, uint32_t block_size) const {
  // Lengths separate the parts, so that no salt looks like another salt with an adapter.
  std::string text = fmt::format("{} {} {} ", block_size, name.salt.size(), name.adapter.size());
  text.append(name.salt).append(name.adapter);
  return hasher_.Root(text);
}

void KeyMaker::Append(std::span<const int32_t> tokens, const KeyNamespace& name, uint32_t block_size,
                      std::vector<uint64_t>& keys) const {
  const size_t blocks = tokens.size() / block_size, before = keys.size();
  keys.resize(before + blocks);
  hasher_.NextBlocks(Root(name, block_size), tokens, block_size, std::span(keys).subspan(before));
}

}  // namespace moesaic::proxy
