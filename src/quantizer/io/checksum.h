// XXH3 checksums of journals, reports and fingerprints.
#pragma once

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <span>
#include <string>

namespace moesaic::quantizer {

class Xxh3 {
 public:
  Xxh3() { XXH3_64bits_reset(&state_); }

  void Add(const void* bytes, size_t count) { XXH3_64bits_update(&state_, bytes, count); }
  /// Adds the text and a terminating zero byte, so that adjacent texts cannot be confused.
  void AddText(const std::string& text) { Add(text.c_str(), text.size() + 1); }

  uint64_t value() const { return XXH3_64bits_digest(&state_); }
  std::string Hex() const { return fmt::format("{:016x}", value()); }  ///< 16 hexadecimal digits

 private:
  XXH3_state_t state_;
};

}  // namespace moesaic::quantizer
