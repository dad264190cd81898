// XXH3 checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace moesaic::base {

/// 64-bit XXH3 of bytes that are added piece by piece. A moved-from checksum may only be assigned to.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(Xxh3&&) noexcept;
  Xxh3& operator=(Xxh3&&) noexcept;

  void Add(const void* bytes, size_t count);
  /// Adds the text and a terminating zero byte, so that adjacent texts cannot be confused.
  void AddText(const std::string& text) { Add(text.c_str(), text.size() + 1); }

  uint64_t value() const;
  std::string Hex() const;  ///< 16 hexadecimal digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the checksum of one text as Xxh3::Hex() writes it. It is equal on all machines.
std::string HexDigest(std::string_view text);

}  // namespace moesaic::base
