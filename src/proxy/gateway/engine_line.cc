#include "proxy/gateway/engine_line.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "proxy/protocol/url_host.h"
#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

constexpr uint16_t kBootstrapPort = 8998;  // of SGLang and Mooncake

Status EngineOption(std::string_view name, std::string_view value, uint64_t max_ranks, EngineSettings* engine,
                    uint64_t* ranks) {
  InstanceConfig& instance = engine->instance;
  uint64_t number = 0;
  const auto count = [&number, value](uint64_t max = UINT32_MAX) -> Status {
    ASSIGN_OR_RETURN(number, ParseNumber(value, max));
    return OkStatus();
  };
  if (name == "role") {
    if (value == "prefill") {
      instance.role = Role::kPrefill;
    } else if (value == "decode") {
      instance.role = Role::kDecode;
    } else if (value != "both") {
      return InvalidArgument("must be prefill, decode or both, found '{}'", value);
    }
  } else if (name == "dp_ranks") {
    RETURN_IF_ERROR(count(std::min(max_ranks, kMaxRanks)));
    if ((*ranks = number) == 0) return InvalidArgument("must be at least 1");
  } else if (name == "group") {
    RETURN_IF_ERROR(count());
    instance.group = static_cast<uint32_t>(number);
  } else if (name == "class") {
    RETURN_IF_ERROR(count(kModelClasses - 1));
    instance.model_class = static_cast<uint32_t>(number);
  } else if (name == "weight") {
    ASSIGN_OR_RETURN(instance.weight, ParseReal(value));
    if (instance.weight <= 0 || instance.weight >= 1e6)
      return InvalidArgument("must be above 0 and below 1000000");
  } else if (name == "max_requests") {
    RETURN_IF_ERROR(count());
    instance.caps.prefill_requests = instance.caps.decode_requests = static_cast<uint32_t>(number);
  } else if (name == "max_prefill_requests") {
    RETURN_IF_ERROR(count());
    instance.caps.prefill_requests = static_cast<uint32_t>(number);
  } else if (name == "max_decode_requests") {
    RETURN_IF_ERROR(count());
    instance.caps.decode_requests = static_cast<uint32_t>(number);
  } else if (name == "max_prefill_tokens") {
    RETURN_IF_ERROR(count(UINT64_MAX));
    instance.caps.prefill_tokens = number;
  } else if (name == "max_decode_tokens") {
    RETURN_IF_ERROR(count(UINT64_MAX));
    instance.caps.decode_tokens = number;
  } else if (name == "kv_blocks") {
    RETURN_IF_ERROR(count(UINT64_MAX));
    instance.caps.kv_blocks = number;
  } else if (name == "batch_tokens") {
    RETURN_IF_ERROR(count());
    if (number == 0) return InvalidArgument("must be at least 1");
    instance.batch_tokens = static_cast<uint32_t>(number);
  } else if (name == "drain" && value.empty()) {
    instance.drain = true;
  } else if (name == "bootstrap_port") {
    RETURN_IF_ERROR(count(65535));
    instance.bootstrap_port = static_cast<uint16_t>(number);
  } else if (name == "resolve" && value.empty()) {
    engine->resolve = true;
  } else if (name == "kv_events") {
    engine->kv_bind = value.starts_with("bind:");
    engine->kv_events = value.substr(engine->kv_bind ? 5 : 0);
    if (!engine->kv_events.starts_with("tcp://") && !engine->kv_events.starts_with("ipc://")) {
      return InvalidArgument("must be an endpoint such as tcp://10.0.0.1:5557, found '{}'", value);
    }
  } else if (name == "kv_replay") {
    engine->kv_replay = value;
    if (!value.starts_with("tcp://") && !value.starts_with("ipc://")) {
      return InvalidArgument("must be an endpoint such as tcp://10.0.0.1:5558, found '{}'", value);
    }
  } else {
    return InvalidArgument("unknown option");
  }
  return OkStatus();
}

// vLLM adds the rank to the port.
std::string PortPlus(const std::string& endpoint, uint64_t rank) {
  const size_t colon = endpoint.rfind(':');
  if (rank == 0 || colon == std::string::npos || !endpoint.starts_with("tcp://")) return endpoint;
  const StatusOr<uint64_t> port = ParseNumber(std::string_view(endpoint).substr(colon + 1), 65535);
  return port.ok() ? fmt::format("{}:{}", endpoint.substr(0, colon), *port + rank) : endpoint;
}

// Checks the port of the last rank.
Status CheckPorts(std::string_view option, const std::string& endpoint, uint64_t ranks) {
  const size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos || !endpoint.starts_with("tcp://")) return OkStatus();
  const StatusOr<uint64_t> port = ParseNumber(std::string_view(endpoint).substr(colon + 1), 65535);
  if (!port.ok() || *port + ranks - 1 <= 65535) return OkStatus();
  return InvalidArgument("{}: {} and dp_ranks={} need port {}, and 65535 is the last one", option, endpoint,
                         ranks, *port + ranks - 1);
}

// Replaces the host of "tcp://HOST:PORT" if it is `name`.
void ReplaceHost(std::string_view name, std::string_view host, std::string* endpoint) {
  constexpr std::string_view kScheme = "tcp://";
  const size_t end = endpoint->rfind(':');
  if (!endpoint->starts_with(kScheme) || end == std::string::npos || end < kScheme.size()) return;
  if (std::string_view(*endpoint).substr(kScheme.size(), end - kScheme.size()) == name)
    endpoint->replace(kScheme.size(), name.size(), host);
}

}  // namespace

StatusOr<uint64_t> ParseNumber(std::string_view text, uint64_t max) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > max) {
    return InvalidArgument("needs an integer in [0, {}], found '{}'", max, text);
  }
  return value;
}

StatusOr<double> ParseReal(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value < 0) {
    return InvalidArgument("needs a number, found '{}'", text);
  }
  return value;
}

// Splits "http://host:port/path".
Status ParseUrl(std::string_view url, EngineSettings* engine) {
  if (url.starts_with("https://")) {
    return Unimplemented("engines are reached over plain HTTP, found '{}'; end TLS in front of the engine",
                         url);
  }
  if (!url.starts_with("http://"))
    return InvalidArgument("needs a URL such as http://10.0.0.1:8000, found '{}'", url);
  std::string_view rest = url.substr(7);
  const size_t slash = std::min(rest.find('/'), rest.size());
  engine->path = rest.substr(slash);
  while (engine->path.ends_with('/')) engine->path.pop_back();
  const std::string_view authority = rest.substr(0, slash);
  const size_t colon = authority.rfind(':');
  const bool has_port =
      colon != std::string_view::npos && authority.find(']', colon) == std::string_view::npos;
  std::string_view host = authority.substr(0, has_port ? colon : authority.size());
  const std::string_view port = has_port ? authority.substr(colon + 1) : "80";
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const StatusOr<uint64_t> number = ParseNumber(port, 65535);
  if (host.empty() || !number.ok() || *number == 0 || authority.find('@') != std::string_view::npos) {
    return InvalidArgument("needs a URL such as http://10.0.0.1:8000, found '{}'", url);
  }
  engine->host_name = host;
  engine->port = static_cast<uint16_t>(*number);
  engine->address.host = authority;
  if (url.size() > 255) return InvalidArgument("the URL is longer than 255 bytes");
  engine->instance.url = fmt::format("http://{}{}", authority, engine->path);
  return OkStatus();
}

StatusOr<std::vector<EngineSettings>> ParseEngine(std::span<const std::string_view> args,
                                                  uint64_t max_ranks) {
  if (args.empty()) return InvalidArgument("needs a URL");
  EngineSettings engine;
  RETURN_IF_ERROR(ParseUrl(args[0], &engine));
  engine.instance.bootstrap_port = kBootstrapPort;
  uint64_t ranks = 1;
  for (const std::string_view option : args.subspan(1)) {
    const size_t equals = std::min(option.find('='), option.size());
    const std::string_view name = option.substr(0, equals);
    const Status set =
        EngineOption(name, option.substr(std::min(equals + 1, option.size())), max_ranks, &engine, &ranks);
    if (!set.ok()) return Annotate(set, std::string(name));
  }
  RETURN_IF_ERROR(CheckPorts("kv_events", engine.kv_events, ranks));
  RETURN_IF_ERROR(CheckPorts("kv_replay", engine.kv_replay, ranks));
  std::vector<EngineSettings> all;
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    EngineSettings one = engine;
    one.instance.dp_rank = static_cast<uint32_t>(rank);
    one.instance.dp_ranks = static_cast<uint32_t>(ranks);
    one.kv_events = PortPlus(engine.kv_events, rank);
    one.kv_replay = PortPlus(engine.kv_replay, rank);
    all.push_back(std::move(one));
  }
  return all;
}

Status Resolve(EngineSettings* engine, bool numeric) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0);
  const std::string port = std::to_string(engine->port);
  if (const int error = getaddrinfo(engine->host_name.c_str(), port.c_str(), &hints, &found); error != 0) {
    if (numeric)
      return InvalidArgument("engine {}: '{}' is no IP address, and the option 'resolve' is missing",
                             engine->instance.url, engine->host_name);
    return IoError("engine {}: cannot resolve '{}': {}", engine->instance.url, engine->host_name,
                   gai_strerror(error));
  }
  engine->address.sockaddr.assign(reinterpret_cast<const char*>(found->ai_addr), found->ai_addrlen);
  freeaddrinfo(found);
  return OkStatus();
}

EngineSettings AtAddress(const EngineSettings& named, std::string_view sockaddr) {
  EngineSettings engine = named;
  engine.resolve = false;
  engine.address.sockaddr = sockaddr;
  char text[INET6_ADDRSTRLEN] = "";
  sockaddr_storage address{};
  std::memcpy(&address, sockaddr.data(), std::min(sockaddr.size(), sizeof address));
  const bool six = address.ss_family == AF_INET6;
  if (six) {
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(named.port);
    inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6&>(address).sin6_addr, text, sizeof text);
  } else {
    reinterpret_cast<sockaddr_in&>(address).sin_port = htons(named.port);
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in&>(address).sin_addr, text, sizeof text);
  }
  engine.address.sockaddr.assign(reinterpret_cast<const char*>(&address), sockaddr.size());
  const std::string host = UrlHost(text);
  engine.host_name = text;
  engine.address.host = fmt::format("{}:{}", host, named.port);
  engine.instance.url = fmt::format("http://{}{}", engine.address.host, named.path);
  engine.instance.pod = SourceNumber(engine.instance.url) | 1U << 31;  // static engines have small numbers
  ReplaceHost(named.host_name, host, &engine.kv_events);
  ReplaceHost(named.host_name, host, &engine.kv_replay);
  return engine;
}

Status FitToPool(const PoolSettings& pool, EngineSettings* engine) {
  if (pool.transfer == Transfer::kAggregated && engine->instance.role != Role::kBoth) {
    return InvalidArgument("engine {}: role={} needs a 'transfer' other than aggregated",
                           engine->instance.url, RoleName(engine->instance.role));
  }
  engine->instance.block_size = pool.block_size;
  return OkStatus();
}

uint32_t SourceNumber(std::string_view name) {
  return static_cast<uint32_t>(std::hash<std::string_view>{}(name)) | 1U;
}

}  // namespace moesaic::proxy
