// Integer division and rounding to whole units.
#pragma once

#include <concepts>
#include <type_traits>

namespace moesaic::base {

/// Returns the number of units of size `unit` > 0 that hold `count` >= 0: CeilDiv(5, 4) is 2.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> CeilDiv(A count, B unit) {
  return (count + unit - 1) / unit;
}

/// Returns the smallest multiple of `unit` > 0 that is at least `count` >= 0.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> RoundUp(A count, B unit) {
  return CeilDiv(count, unit) * unit;
}

}  // namespace moesaic::base
