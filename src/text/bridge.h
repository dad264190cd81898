// C++ side of the Rust bridge: converts its errors to statuses and its vectors to strings. Private to this
// room.
#pragma once

#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "text_bridge/bridge.h"

namespace moesaic::text {

inline rust::Slice<const uint8_t> Bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

inline std::string ToString(const rust::Vec<uint8_t>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

/// Runs `body`, which calls the bridge and returns a value. Converts the bridge's errors to InvalidArgument.
template <typename Body>
auto Bridged(Body&& body) -> StatusOr<decltype(body())> {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory");
  } catch (const std::exception& error) {
    return InvalidArgument("{}", error.what());
  }
}

}  // namespace moesaic::text
