// Settings of a pool of engines, as the directives of a moesaic_pool block give them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "proxy/gateway/network.h"
#include "proxy/protocol/request_body.h"
#include "proxy/schedule/scheduler.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {

/// A resolved address: the bytes of a sockaddr.
struct EngineAddress {
  std::string sockaddr;
  std::string host;  ///< "HOST:PORT", for the Host header
};

/// One engine, or one data-parallel rank of it.
struct EngineSettings {
  InstanceConfig instance;
  EngineAddress address;
  std::string path;       ///< prefix of the URL's path without a trailing slash; usually empty
  std::string host_name;  ///< host part of the URL, for bootstrap_host
  uint16_t port = 80;
  std::string kv_events;  ///< endpoint of the PUB socket; empty: none
  std::string kv_replay;  ///< endpoint of the ROUTER socket; empty: none
  bool kv_bind = false;   ///< the proxy binds kv_events and the engine connects
  bool resolve = false;   ///< one engine for each address of the name, which is looked up repeatedly
};

/// Engines that etcd names below a prefix.
struct EtcdSettings {
  std::string prefix;
  std::vector<EngineSettings> members;  ///< servers of etcd
};

struct ApiKey {
  std::string key;
  std::string name;
  std::optional<TenantLimit> limit;  ///< none: SchedulerOptions::tenant
  int32_t priority = 0;              ///< larger is more urgent
};

struct PoolSettings {
  std::string name;
  std::vector<EngineSettings> engines;
  std::vector<EngineSettings> named;  ///< engines with `resolve`, whose addresses are looked up
  std::vector<EtcdSettings> etcd;
  Transfer transfer = Transfer::kAggregated;
  Dialect dialect = Dialect::kVllm;
  std::string policy = "moesaic";
  std::string model_folder;           ///< tokenizer and chat template; empty: tokens are estimated
  std::vector<std::string> adapters;  ///< model names that are LoRA adapters
  bool forward_tokens = true;
  size_t token_cache_bytes = 64 << 20;
  size_t zone_bytes = 64 << 20;
  uint32_t max_instances = 128, max_requests = 8192;
  uint32_t block_size = 0;  ///< tokens of a KV block; 0: the API's, which FinishPool sets
  SchedulerOptions scheduler;
  PolicyOptions policy_options;
  BreakerOptions breaker;
  std::vector<ApiKey> keys;  ///< empty: requests need none
  size_t max_body_bytes = 64 << 20;
  size_t body_memory = 1 << 30;  ///< of a worker, for bodies of all its requests
  uint32_t client_priority = 0;  ///< bound of the priority that a body gives, in both directions
  bool client_transfer = false;  ///< transfer fields of clients reach engines
  /// Paths that go to an engine without scheduling; one that ends with '/' includes all paths below it.
  std::vector<std::string> passed = {"/v1/models", "/v1/models/", "/health",    "/ping",
                                     "/version",   "/tokenize",   "/detokenize"};
  Nanos connect_timeout = 5 * kSecond;
  Nanos prefill_timeout = 600 * kSecond;  ///< from sending to the first byte of the answer
  Nanos idle_timeout = 600 * kSecond;     ///< between two reads of an answer
  Nanos queue_timeout = 300 * kSecond;    ///< in a queue of the proxy
  Nanos retry_delay =
      50 * kMillisecond;  ///< before the first retry; grows by half each time, with 20% jitter
  std::string health_path = "/health";
  Nanos health_interval = 5 * kSecond;  ///< 0: no active checks
  Nanos health_timeout = 2 * kSecond;
  uint32_t health_failures = 2, health_successes = 1;
  std::string metaserver;  ///< URL of this proxy's moesaic_metaserver location, for ascend

  std::vector<Network> metaserver_allow;  ///< engines that may use that location

  std::vector<InstanceConfig> Instances() const;
  bool Discovers() const { return !named.empty() || !etcd.empty(); }
  /// InstanceConfig::source of the engines that are discovered.
  std::vector<uint32_t> Sources() const;
};

/// One directive of the block. The table is the only list of them: parsing and the reference use it.
struct Directive {
  std::string_view name;
  std::string_view syntax;  ///< the arguments
  std::string_view default_text;
  std::string_view description;
  Status (*set)(PoolSettings& pool, std::span<const std::string_view> args);
};
std::span<const Directive> Directives();

/// Applies one directive. Errors name it and the wrong value.
Status ApplyDirective(PoolSettings& pool, std::string_view name, std::span<const std::string_view> args);
/// Checks the block as a whole, resolves host names and derives settings that depend on several directives.
Status FinishPool(PoolSettings& pool);

/// Settings of an engine that only its record is known of: all but the endpoints of its events.
StatusOr<EngineSettings> EngineOf(const InstanceConfig& config);

/// The table in Markdown, for docs/proxy-directives.md.
std::string DirectiveReference();

/// Value of "250ms", "2s", "5m" or "1h", at most 1000000000s.
StatusOr<Nanos> ParseDuration(std::string_view text);
/// Value of "64k", "64m" or "1g".
StatusOr<size_t> ParseBytes(std::string_view text);

}  // namespace moesaic::proxy
