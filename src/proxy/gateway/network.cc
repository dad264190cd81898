#include "proxy/gateway/network.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>

namespace moesaic::proxy {
namespace {

constexpr int kMappedBits = 96;  // of the prefix of IPv4 addresses

std::array<uint8_t, 16> Mapped(const in_addr& four) {
  std::array<uint8_t, 16> address{};
  address[10] = address[11] = 0xFF;
  std::memcpy(&address[12], &four, sizeof four);
  return address;
}

std::optional<std::array<uint8_t, 16>> IpOf(std::string_view bytes) {
  sockaddr_storage storage{};
  std::memcpy(&storage, bytes.data(), std::min(bytes.size(), sizeof storage));
  if (storage.ss_family == AF_INET) return Mapped(reinterpret_cast<const sockaddr_in&>(storage).sin_addr);
  if (storage.ss_family != AF_INET6) return std::nullopt;
  std::array<uint8_t, 16> address;
  std::memcpy(address.data(), &reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr, address.size());
  return address;
}

}  // namespace

StatusOr<Network> ParseNetwork(std::string_view text) {
  if (text == "all") return Network{};
  const size_t slash = std::min(text.find('/'), text.size());
  const std::string host(text.substr(0, slash));
  Network network;
  in_addr four;
  int most = 128, offset = 0;
  if (inet_pton(AF_INET, host.c_str(), &four) == 1) {
    network.address = Mapped(four);
    most = 32;
    offset = kMappedBits;
  } else if (inet_pton(AF_INET6, host.c_str(), network.address.data()) != 1) {
    return InvalidArgument("needs an IP address or a network such as 10.0.0.0/8, found '{}'", text);
  }
  int bits = most;
  if (slash < text.size()) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + slash + 1, end, bits);
    if (error != std::errc() || stop != end || bits < 0 || bits > most)
      return InvalidArgument("a network has 0 to {} bits, found '{}'", most, text);
  }
  network.bits = bits + offset;
  return network;
}

bool Contains(std::span<const Network> networks, std::string_view sockaddr) {
  const auto address = IpOf(sockaddr);
  if (!address) return true;
  return std::any_of(networks.begin(), networks.end(), [&](const Network& network) {
    const auto whole = static_cast<size_t>(network.bits / 8);
    if (std::memcmp(address->data(), network.address.data(), whole) != 0) return false;
    const int rest = network.bits % 8;
    return rest == 0 || ((*address)[whole] ^ network.address[whole]) >> (8 - rest) == 0;
  });
}

}  // namespace moesaic::proxy
