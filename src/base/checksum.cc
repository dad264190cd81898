#define XXH_INLINE_ALL
#include "base/checksum.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace moesaic::base {

struct Xxh3::State {
  XXH3_state_t state;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->state); }
Xxh3::~Xxh3() = default;
Xxh3::Xxh3(Xxh3&&) noexcept = default;
Xxh3& Xxh3::operator=(Xxh3&&) noexcept = default;

void Xxh3::Add(const void* bytes, size_t count) { XXH3_64bits_update(&state_->state, bytes, count); }
uint64_t Xxh3::value() const { return XXH3_64bits_digest(&state_->state); }
std::string Xxh3::Hex() const { return fmt::format("{:016x}", value()); }

std::string HexDigest(std::string_view text) {
  Xxh3 digest;
  digest.Add(text.data(), text.size());
  return digest.Hex();
}

}  // namespace moesaic::base
