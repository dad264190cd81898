// IPv6 of ZeroMQ sockets.
#pragma once

#include <zmq.h>

#include <string_view>

namespace moesaic::proxy {

/// Lets a socket use an endpoint with an IPv6 address. Names keep resolving to IPv4, where engines bind
/// wildcards.
inline void AllowIpv6(void* socket, std::string_view endpoint) {
  const int six = endpoint.find('[') != std::string_view::npos ? 1 : 0;
  zmq_setsockopt(socket, ZMQ_IPV6, &six, sizeof six);
}

}  // namespace moesaic::proxy
