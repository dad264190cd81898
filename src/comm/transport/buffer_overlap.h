// Buffers that share bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

namespace moesaic::comm {

/// Returns the offset in `output` of the first byte that it shares with `input`; empty if they share none.
inline std::optional<int64_t> SharedOffset(std::span<const std::byte> input,
                                           std::span<const std::byte> output) {
  constexpr std::less<> kBefore{};
  if (input.empty() || output.empty() || !kBefore(input.data(), output.data() + output.size()) ||
      !kBefore(output.data(), input.data() + input.size())) {
    return std::nullopt;
  }
  return std::max<int64_t>(0, input.data() - output.data());
}

}  // namespace moesaic::comm
