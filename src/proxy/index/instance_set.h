// The set of instances of one block: up to four in the word itself, more in a bit set.
#pragma once

#include <array>
#include <cstdint>

#include "proxy/index/block_index.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

static_assert(kMaxNumbers == 1 << 11);

/// A word of the table. Bit 63 clear: four fields of 15 bits, each the number of an instance in 11 bits and a
/// mask of tiers in 4; a field without tiers is empty. Bit 63 set: number of a bit set in the lower 32 bits,
/// tag of its use above.
class SetWord {
 public:
  static constexpr int kInline = 4;

  constexpr explicit SetWord(uint64_t word = 0) : word_(word) {}
  static constexpr SetWord OfSet(uint32_t number, uint32_t tag) {
    return SetWord(uint64_t{1} << 63 | uint64_t{tag & 0x7fffffffU} << 32 | number);
  }
  constexpr uint64_t word() const { return word_; }
  constexpr bool empty() const { return word_ == 0; }
  constexpr bool is_set() const { return (word_ >> 63) != 0; }
  constexpr uint32_t set_number() const { return static_cast<uint32_t>(word_); }

  constexpr uint32_t field(int i) const { return static_cast<uint32_t>(word_ >> (15 * i)) & 0x7fff; }
  static constexpr int NumberOf(uint32_t field) { return static_cast<int>(field & 0x7ff); }
  static constexpr uint32_t TiersOf(uint32_t field) { return field >> 11; }
  /// Tiers in which an inline word has the number.
  constexpr uint32_t TiersFor(int number) const {
    for (int i = 0; i < kInline; ++i) {
      if (TiersOf(field(i)) != 0 && NumberOf(field(i)) == number) return TiersOf(field(i));
    }
    return 0;
  }
  /// An inline word with the number's tiers replaced; false when four others fill it.
  constexpr bool Assign(int number, uint32_t tiers) {
    int at = -1;
    for (int i = 0; i < kInline; ++i) {
      const uint32_t tiers_here = TiersOf(field(i));
      if (tiers_here != 0 && NumberOf(field(i)) == number) {
        at = i;
        break;
      }
      if (tiers_here == 0 && at < 0) at = i;
    }
    if (at < 0) return tiers == 0;
    const uint64_t value = tiers == 0 ? 0 : static_cast<uint64_t>(number) | uint64_t{tiers} << 11;
    word_ = (word_ & ~(uint64_t{0x7fff} << (15 * at))) | value << (15 * at);
    return true;
  }

 private:
  uint64_t word_;
};

constexpr uint32_t TierBit(Tier tier) { return 1U << static_cast<uint32_t>(tier); }
inline constexpr uint32_t kDeviceTiers = TierBit(Tier::kDevice) | TierBit(Tier::kSpeculative);
inline constexpr uint32_t kConfirmedTiers =
    TierBit(Tier::kDevice) | TierBit(Tier::kHost) | TierBit(Tier::kDisk);

}  // namespace moesaic::proxy
