// Parses the arguments of the directive `engine`, which values in etcd have too.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proxy/gateway/settings.h"

namespace moesaic::proxy {

inline constexpr uint64_t kMaxRanks = 1024;  ///< data-parallel ranks of an engine

/// Returns the engine of "URL [OPTION=VALUE ...]", once for each data-parallel rank. Its address is not
/// resolved. An engine with more than `max_ranks` ranks is refused.
StatusOr<std::vector<EngineSettings>> ParseEngine(std::span<const std::string_view> args,
                                                  uint64_t max_ranks = kMaxRanks);

/// Reads "http://HOST[:PORT][/PATH]" into the engine's URL, names, port and path.
Status ParseUrl(std::string_view url, EngineSettings* engine);

/// Sets the address of the engine's name. It may wait for a name server, except when `numeric`: then the name
/// must be an IP address, and InvalidArgument says so otherwise.
Status Resolve(EngineSettings* engine, bool numeric = false);

/// Returns the engine at one address of its name, given as a sockaddr of any port. Its URL, and the endpoints
/// that have the same host, name the address.
EngineSettings AtAddress(const EngineSettings& named, std::string_view sockaddr);

/// Checks an engine against settings of the pool, and sets those that it takes from there.
Status FitToPool(const PoolSettings& pool, EngineSettings* engine);

/// Number of the source of discovered engines with this name. Equal in all processes, not 0.
uint32_t SourceNumber(std::string_view name);

StatusOr<uint64_t> ParseNumber(std::string_view text, uint64_t max = UINT32_MAX);
/// A finite number that is not negative.
StatusOr<double> ParseReal(std::string_view text);

}  // namespace moesaic::proxy
