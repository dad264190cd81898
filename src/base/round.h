// Whole numbers of units.
#pragma once

#include <concepts>
#include <type_traits>

namespace moesaic::base {

/// How many units of `unit` > 0 hold `count` >= 0: 5 by 4 are 2.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> CeilDiv(A count, B unit) {
  return (count + unit - 1) / unit;
}

/// The least multiple of `unit` > 0 that is not less than `count` >= 0.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> RoundUp(A count, B unit) {
  return CeilDiv(count, unit) * unit;
}

}  // namespace moesaic::base
