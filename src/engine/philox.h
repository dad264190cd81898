// A counter-based random generator: the n-th number of a seed is computed, not remembered, so a draw does not
// depend on other draws. Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3" (SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace moesaic::engine {

/// The 128 random bits of `counter` under `key`.
constexpr std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  // Multipliers and Weyl increments of the paper, section 4.3 and table 2.
  constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(kMultiply0) * counter[0];
    const uint64_t b = static_cast<uint64_t>(kMultiply1) * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

/// The seed of choice `index` of a request for several choices. The first choice uses `seed` itself. Each
/// other choice uses a stream of its own, which no small seed shares.
constexpr uint64_t SeedOf(uint64_t seed, uint64_t index) {
  if (index == 0) return seed;
  // The third word of the counter separates these numbers from the numbers that draw tokens.
  const auto bits = Philox({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 1, 0},
                           {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<uint64_t>(bits[0]) << 32 | bits[1];
}

/// A uniform double in [0, 1) with 53 random bits: number `position` of stream `seed`.
constexpr double UniformAt(uint64_t seed, uint64_t position) {
  const auto bits = Philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
                           {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t high = (static_cast<uint64_t>(bits[0]) << 32 | bits[1]) >> 11;
  return static_cast<double>(high) * 0x1.0p-53;
}

}  // namespace moesaic::engine
