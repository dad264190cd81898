// Random numbers that are equal on every platform, unlike those of <random>'s distributions.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace moesaic::parallel {

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  /// Number from 0 to bound - 1; the bias is negligible for bounds below 2^32.
  int Below(int bound) { return static_cast<int>(Next() % static_cast<uint64_t>(bound)); }
  /// Number in (0, 1].
  double Uniform() { return (static_cast<double>(Next() >> 11) + 1) / 9007199254740992.0; }
  /// Standard normal number (Box-Muller).
  double Normal() {
    const double radius = std::sqrt(-2 * std::log(Uniform()));
    return radius * std::cos(2 * std::numbers::pi * Uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace moesaic::parallel
