// IP networks, for lists of addresses that are allowed.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace moesaic::proxy {

/// A range of addresses. IPv4 addresses are mapped to IPv6 (RFC 4291, 2.5.5.2).
struct Network {
  std::array<uint8_t, 16> address{};
  int bits = 0;  ///< of the address that count, in [0, 128]
};

/// Parses "10.0.0.0/8", "::1" or "all".
StatusOr<Network> ParseNetwork(std::string_view text);

/// Returns whether a network contains the address of a sockaddr. Unix sockets are in all networks.
bool Contains(std::span<const Network> networks, std::string_view sockaddr);

}  // namespace moesaic::proxy
