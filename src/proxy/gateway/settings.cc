#include "proxy/gateway/settings.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <memory>

#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

using Args = std::span<const std::string_view>;

constexpr uint32_t kDefaultBlockSize = 16;  // of vLLM on GPUs
constexpr uint32_t kMoesaicBlockSize = 64;  // of this project's engine
constexpr uint32_t kMaxBlockSize = 4096;

StatusOr<uint64_t> ParseNumber(std::string_view text, uint64_t max = UINT32_MAX) {
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

StatusOr<bool> ParseSwitch(std::string_view text) {
  if (text == "on") return true;
  if (text == "off") return false;
  return InvalidArgument("needs on or off, found '{}'", text);
}

Status One(Args args) {
  return args.size() == 1 ? OkStatus() : InvalidArgument("needs one value, found {}", args.size());
}

template <auto Member>
Status SetDuration(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.*Member, ParseDuration(args[0]));
  return OkStatus();
}

template <auto Member>
Status SetBytes(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.*Member, ParseBytes(args[0]));
  return OkStatus();
}

template <auto Member>
Status SetText(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  pool.*Member = std::string(args[0]);
  return OkStatus();
}

template <auto Member>
Status SetCount(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(const uint64_t value, ParseNumber(args[0]));
  pool.*Member = static_cast<uint32_t>(value);
  return OkStatus();
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
  engine->address.host = authority;
  if (url.size() > 255) return InvalidArgument("the URL is longer than 255 bytes");
  engine->instance.url = fmt::format("http://{}{}", authority, engine->path);
  return OkStatus();
}

Status EngineOption(std::string_view name, std::string_view value, EngineSettings* engine, uint64_t* ranks) {
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
    RETURN_IF_ERROR(count(1024));
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
  } else if (name == "bootstrap_port") {
    RETURN_IF_ERROR(count(65535));
    engine->bootstrap_port = static_cast<int>(number);
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

Status SetEngine(PoolSettings& pool, Args args) {
  if (args.empty()) return InvalidArgument("needs a URL");
  EngineSettings engine;
  RETURN_IF_ERROR(ParseUrl(args[0], &engine));
  uint64_t ranks = 1;
  for (const std::string_view option : args.subspan(1)) {
    const size_t equals = std::min(option.find('='), option.size());
    const std::string_view name = option.substr(0, equals);
    const Status set =
        EngineOption(name, option.substr(std::min(equals + 1, option.size())), &engine, &ranks);
    if (!set.ok()) return Annotate(set, std::string(name));
  }
  uint32_t pod = 0;
  for (const EngineSettings& other : pool.engines) pod = std::max(pod, other.instance.pod + 1);
  engine.instance.pod = pod;
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    EngineSettings one = engine;
    one.instance.dp_rank = static_cast<uint32_t>(rank);
    one.ranked = ranks > 1;
    one.kv_events = PortPlus(engine.kv_events, rank);
    one.kv_replay = PortPlus(engine.kv_replay, rank);
    for (const EngineSettings& other : pool.engines) {
      if (other.instance.url == one.instance.url && other.instance.dp_rank == one.instance.dp_rank) {
        return InvalidArgument("'{}' is listed twice", one.instance.url);
      }
    }
    pool.engines.push_back(std::move(one));
  }
  return OkStatus();
}

Status SetTransfer(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.transfer, ParseTransfer(args[0]));
  return OkStatus();
}

Status SetDialect(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.dialect, ParseDialect(args[0]));
  return OkStatus();
}

Status SetPolicy(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  for (const std::string_view known : PolicyNames()) {
    if (known == args[0]) {
      pool.policy = args[0];
      return OkStatus();
    }
  }
  return InvalidArgument("unknown policy '{}'; known: {}", args[0], fmt::join(PolicyNames(), " "));
}

Status SetAdapters(PoolSettings& pool, Args args) {
  pool.adapters.insert(pool.adapters.end(), args.begin(), args.end());
  return OkStatus();
}

Status SetForward(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.forward_tokens, ParseSwitch(args[0]));
  return OkStatus();
}

Status SetKey(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 2 || args[0].empty())
    return InvalidArgument("needs KEY and an optional name");
  pool.keys.push_back({std::string(args[0]), std::string(args.size() > 1 ? args[1] : "")});
  return OkStatus();
}

Status SetKeyFile(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  std::ifstream file{std::string(args[0])};
  if (!file) return NotFound("cannot open '{}'", args[0]);
  std::string line;
  while (std::getline(file, line)) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (line.empty() || line.front() == '#') continue;
    const size_t space = std::min(line.find_first_of(" \t"), line.size());
    const size_t name = line.find_first_not_of(" \t", space);
    pool.keys.push_back({line.substr(0, space), name == std::string::npos ? "" : line.substr(name)});
  }
  if (pool.keys.empty()) return InvalidArgument("'{}' has no key", args[0]);
  return OkStatus();
}

Status SetStarvation(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.scheduler.starvation_bound, ParseDuration(args[0]));
  return OkStatus();
}

Status SetQueueLimit(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 2) return InvalidArgument("needs COUNT and an optional TIME");
  ASSIGN_OR_RETURN(const uint64_t count, ParseNumber(args[0]));
  pool.scheduler.queue_limit = static_cast<uint32_t>(count);
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.scheduler.queue_time_limit, ParseDuration(args[1]));
  }
  return OkStatus();
}

Status SetTenantRate(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 2)
    return InvalidArgument("needs TOKENS_PER_SECOND and an optional BURST");
  ASSIGN_OR_RETURN(pool.scheduler.tenant.tokens_per_second, ParseReal(args[0]));
  pool.scheduler.tenant.burst_tokens = pool.scheduler.tenant.tokens_per_second;
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.scheduler.tenant.burst_tokens, ParseReal(args[1]));
  }
  return OkStatus();
}

Status SetSkip(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(const uint64_t tokens, ParseNumber(args[0]));
  pool.scheduler.skip_prefill_tokens = static_cast<uint32_t>(tokens);
  return OkStatus();
}

Status SetRetries(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 2) return InvalidArgument("needs COUNT and an optional DELAY");
  ASSIGN_OR_RETURN(const uint64_t count, ParseNumber(args[0], kMaxExcluded));
  pool.scheduler.max_retries = static_cast<uint32_t>(count);
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.retry_delay, ParseDuration(args[1]));
  }
  return OkStatus();
}

Status SetBreaker(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 3)
    return InvalidArgument("needs FAILURES, and optionally OPEN and MAX_OPEN");
  ASSIGN_OR_RETURN(const uint64_t count, ParseNumber(args[0]));
  pool.breaker.failures = static_cast<uint32_t>(count);
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.breaker.open, ParseDuration(args[1]));
  }
  if (args.size() > 2) {
    ASSIGN_OR_RETURN(pool.breaker.max_open, ParseDuration(args[2]));
  }
  return OkStatus();
}

Status SetHealth(PoolSettings& pool, Args args) {
  if (args.size() == 1 && args[0] == "off") {
    pool.health_interval = 0;
    return OkStatus();
  }
  if (args.empty() || args.size() > 3 || !args[0].starts_with('/')) {
    return InvalidArgument("needs off, or PATH and optionally INTERVAL and TIMEOUT");
  }
  pool.health_path = args[0];
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.health_interval, ParseDuration(args[1]));
  }
  if (args.size() > 2) {
    ASSIGN_OR_RETURN(pool.health_timeout, ParseDuration(args[2]));
  }
  if (pool.health_interval < 10 * kMillisecond) return InvalidArgument("INTERVAL must be at least 10ms");
  return OkStatus();
}

Status SetSlo(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 2) return InvalidArgument("needs TTFT and an optional TPOT");
  ASSIGN_OR_RETURN(pool.policy_options.slo_ttft, ParseDuration(args[0]));
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.policy_options.slo_tpot, ParseDuration(args[1]));
  }
  return OkStatus();
}

Status SetShed(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.policy_options.rejects, ParseSwitch(args[0]));
  return OkStatus();
}

Status SetPass(PoolSettings& pool, Args args) {
  for (const std::string_view path : args) {
    if (!path.starts_with('/'))
      return InvalidArgument("needs paths such as /v1/embeddings, found '{}'", path);
  }
  pool.passed.insert(pool.passed.end(), args.begin(), args.end());
  return OkStatus();
}

Status SetClientPriority(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(const uint64_t bound, ParseNumber(args[0], 1'000'000'000));
  pool.client_priority = static_cast<uint32_t>(bound);
  return OkStatus();
}

Status SetClientTransfer(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(pool.client_transfer, ParseSwitch(args[0]));
  return OkStatus();
}

Status SetBlockSize(PoolSettings& pool, Args args) {
  RETURN_IF_ERROR(One(args));
  ASSIGN_OR_RETURN(const uint64_t tokens, ParseNumber(args[0]));
  if (tokens == 0 || tokens > kMaxBlockSize)
    return InvalidArgument("must be in [1, {}], found {}", kMaxBlockSize, tokens);
  pool.block_size = static_cast<uint32_t>(tokens);
  return OkStatus();
}

// Resolves the engine's name.
Status Resolve(EngineSettings* engine) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const std::string_view authority = engine->address.host;
  const size_t colon = authority.rfind(':');
  const bool has_port =
      colon != std::string_view::npos && authority.find(']', colon) == std::string_view::npos;
  const std::string port = has_port ? std::string(authority.substr(colon + 1)) : "80";
  if (const int error = getaddrinfo(engine->host_name.c_str(), port.c_str(), &hints, &found); error != 0) {
    return IoError("engine {}: cannot resolve '{}': {}", engine->instance.url, engine->host_name,
                   gai_strerror(error));
  }
  engine->address.sockaddr.assign(reinterpret_cast<const char*>(found->ai_addr), found->ai_addrlen);
  freeaddrinfo(found);
  return OkStatus();
}

constexpr Directive kDirectives[] = {
    {"engine", "URL [OPTION=VALUE ...]", "",
     "Adds an engine. Options: `role=both|prefill|decode`; `dp_ranks=N` data-parallel ranks, each scheduled "
     "by itself; "
     "`group=N` (a decode engine is chosen in the group of the prefill engine); `class=N` (engines of one "
     "class share a "
     "latency model); `weight=X` relative speed; `max_requests=N`, `max_prefill_requests=N`, "
     "`max_decode_requests=N`, "
     "`max_prefill_tokens=N`, `max_decode_tokens=N`, `kv_blocks=N` bounds that hold; `kv_events=ENDPOINT` "
     "(with "
     "`bind:` before it the proxy binds and the engine connects), `kv_replay=ENDPOINT`; `bootstrap_port=N`.",
     SetEngine},
    {"transfer", "aggregated | nixl | mooncake | sglang | ascend", "aggregated",
     "How prefill and decode engines exchange KV. `aggregated`: one engine does both.", SetTransfer},
    {"api", "vllm | sglang | moesaic", "vllm", "API of the engines. It decides how token ids are forwarded.",
     SetDialect},
    {"policy", "NAME", "moesaic",
     "Scheduling policy: `moesaic`, or one of the baselines `random`, `round-robin`, `least-requests`, "
     "`least-tokens`, `sglang-cache-aware`, `dynamo`, `llm-d`, `aibrix`, `mooncake`, `omni`, "
     "`omni-earliest-batch`.",
     SetPolicy},
    {"model", "FOLDER", "",
     "Folder with `tokenizer.json` and the chat template. Without it the prompt's tokens are estimated from "
     "its bytes, "
     "and only prompts of token ids are matched with cached prefixes.",
     SetText<&PoolSettings::model_folder>},
    {"adapters", "NAME ...", "", "Model names that are LoRA adapters: their blocks are separate.",
     SetAdapters},
    {"forward_tokens", "on | off", "on",
     "Sends token ids to engines that accept them, so that these skip their "
     "tokenizer.",
     SetForward},
    {"token_cache", "SIZE", "64m", "Memory of each worker for token ids of prompt segments.",
     SetBytes<&PoolSettings::token_cache_bytes>},
    {"zone", "SIZE", "64m", "Shared memory for requests, engines and the prefix index.",
     SetBytes<&PoolSettings::zone_bytes>},
    {"max_engines", "COUNT", "128", "Engines (data-parallel ranks) that the zone has room for.",
     SetCount<&PoolSettings::max_instances>},
    {"max_live", "COUNT", "8192", "Requests that are in the proxy at one time; more get 503.",
     SetCount<&PoolSettings::max_requests>},
    {"block_size", "TOKENS", "16",
     "Tokens of a KV block of the engines; with `api moesaic` the default is 64.", SetBlockSize},
    {"queue", "COUNT [TIME]", "4096",
     "Requests that may wait; more get 429 with `Retry-After`. With TIME, so do "
     "requests whose predicted wait is longer.",
     SetQueueLimit},
    {"queue_timeout", "TIME", "5m", "A request that waits longer gets 503.",
     SetDuration<&PoolSettings::queue_timeout>},
    {"starvation_bound", "TIME", "10s",
     "A request that has waited this long is placed before all younger ones.", SetStarvation},
    {"slo", "TTFT [TPOT]", "", "Targets that the policy orders by.", SetSlo},
    {"shed", "on | off", "off", "Lets the policy answer 429 to requests that cannot meet the `slo`.",
     SetShed},
    {"skip_prefill", "TOKENS", "256",
     "With separate prefill: prompts with fewer uncached tokens go to a decode "
     "engine at once.",
     SetSkip},
    {"tenant_rate", "TOKENS_PER_SECOND [BURST]", "",
     "Rate of prompt and requested output tokens of each API key; more "
     "get 429.",
     SetTenantRate},
    {"key", "KEY [NAME]", "",
     "Requests need this key, or another listed one, as `Authorization: Bearer KEY`.", SetKey},
    {"key_file", "FILE", "", "Keys, one `KEY [NAME]` a line.", SetKeyFile},
    {"pass", "PATH ...", "",
     "More paths that go to an engine without scheduling, besides `/v1/models`, `/health`, `/ping`, "
     "`/version`, `/tokenize` and `/detokenize`; a path that ends with `/` includes all paths below it. "
     "Other "
     "paths get 404.",
     SetPass},
    {"client_priority", "BOUND", "0", "A request's `priority` counts up to this bound, in both directions.",
     SetClientPriority},
    {"client_transfer", "on | off", "off",
     "Lets engines get `kv_transfer_params`, bootstrap fields and data-parallel ranks "
     "of clients. Clients can make engines fetch KV from any host with them.",
     SetClientTransfer},
    {"body_memory", "SIZE", "1g", "Bytes of bodies that each worker holds; more get 503.",
     SetBytes<&PoolSettings::body_memory>},
    {"max_body", "SIZE", "64m", "Larger bodies get 413.", SetBytes<&PoolSettings::max_body_bytes>},
    {"connect_timeout", "TIME", "5s", "Limit of connecting to an engine.",
     SetDuration<&PoolSettings::connect_timeout>},
    {"prefill_timeout", "TIME", "10m", "Limit from sending a request to the first byte of the answer.",
     SetDuration<&PoolSettings::prefill_timeout>},
    {"idle_timeout", "TIME", "10m", "Limit between two reads of an answer.",
     SetDuration<&PoolSettings::idle_timeout>},
    {"retries", "COUNT [DELAY]", "2 50ms",
     "Attempts on other engines while no byte was sent to the client. The delay "
     "grows by half each time and has 20% jitter.",
     SetRetries},
    {"breaker", "FAILURES [OPEN [MAX_OPEN]]", "3 1s 1m",
     "After FAILURES consecutive failures an engine gets no request "
     "for OPEN, doubled with each further failure.",
     SetBreaker},
    {"health", "off | PATH [INTERVAL [TIMEOUT]]", "/health 5s 2s", "Active health checks.", SetHealth},
    {"metaserver", "URL", "",
     "With `transfer ascend`: URL of the `moesaic_metaserver` location, for the engines.",
     SetText<&PoolSettings::metaserver>},
};

}  // namespace

std::vector<InstanceConfig> PoolSettings::Instances() const {
  std::vector<InstanceConfig> instances;
  for (const EngineSettings& engine : engines) instances.push_back(engine.instance);
  return instances;
}

std::span<const Directive> Directives() { return kDirectives; }

Status ApplyDirective(PoolSettings& pool, std::string_view name, Args args) {
  for (const Directive& directive : kDirectives) {
    if (directive.name == name) return Annotate(directive.set(pool, args), std::string(name));
  }
  return InvalidArgument("unknown directive '{}' in moesaic_pool", name);
}

Status FinishPool(PoolSettings& pool) {
  if (pool.engines.empty()) return InvalidArgument("moesaic_pool '{}' has no engine", pool.name);
  if (pool.engines.size() > pool.max_instances) {
    return InvalidArgument("moesaic_pool '{}' has {} engines, more than max_engines {}", pool.name,
                           pool.engines.size(), pool.max_instances);
  }
  if (pool.block_size == 0)
    pool.block_size = pool.dialect == Dialect::kMoesaic ? kMoesaicBlockSize : kDefaultBlockSize;
  bool prefill = false, decode = false;
  for (EngineSettings& engine : pool.engines) {
    const Role role = engine.instance.role;
    engine.instance.block_size = pool.block_size;
    prefill = prefill || role != Role::kDecode;
    decode = decode || role != Role::kPrefill;
    if (pool.transfer == Transfer::kAggregated && role != Role::kBoth) {
      return InvalidArgument("engine {}: role={} needs a 'transfer' other than aggregated",
                             engine.instance.url, RoleName(role));
    }
    if (!engine.address.sockaddr.empty()) continue;
    RETURN_IF_ERROR(Resolve(&engine));
  }
  if (!prefill) return InvalidArgument("moesaic_pool '{}' has no engine that does prefill", pool.name);
  if (!decode) return InvalidArgument("moesaic_pool '{}' has no engine that does decode", pool.name);
  if (pool.transfer == Transfer::kAscend && pool.metaserver.empty()) {
    return InvalidArgument("'transfer ascend' needs 'metaserver'");
  }
  // SGLang's decode engines compute no prompts.
  if (pool.transfer == Transfer::kSglang) pool.scheduler.skip_prefill_tokens = 0;
  return OkStatus();
}

StatusOr<EngineSettings> EngineOf(const InstanceConfig& config) {
  EngineSettings engine;
  RETURN_IF_ERROR(ParseUrl(config.url, &engine));
  engine.instance = config;
  engine.bootstrap_port = 0;
  RETURN_IF_ERROR(Resolve(&engine));
  return engine;
}

std::string DirectiveReference() {
  std::string text = "| directive | default | meaning |\n|---|---|---|\n";
  for (const Directive& d : kDirectives) {
    std::string syntax(d.syntax);
    for (size_t at = 0; (at = syntax.find('|', at)) != std::string::npos; at += 2) syntax.insert(at, "\\");
    std::string meaning(d.description);
    for (size_t at = 0; (at = meaning.find('|', at)) != std::string::npos; at += 2) meaning.insert(at, "\\");
    text += fmt::format("| `{} {};` | {} | {} |\n", d.name, syntax,
                        d.default_text.empty() ? "none" : fmt::format("`{}`", d.default_text), meaning);
  }
  return text;
}

StatusOr<Nanos> ParseDuration(std::string_view text) {
  constexpr std::pair<std::string_view, Nanos> kUnits[] = {
      {"ms", kMillisecond}, {"s", kSecond}, {"m", 60 * kSecond}, {"h", 3600 * kSecond}, {"", kSecond}};
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  for (const auto& [name, nanos] : kUnits) {
    if (error == std::errc() && unit == name && value <= 1'000'000'000)
      return static_cast<Nanos>(value) * nanos;
  }
  return InvalidArgument("needs a time such as 250ms, 2s or 5m, found '{}'", text);
}

StatusOr<size_t> ParseBytes(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  constexpr std::pair<std::string_view, int> kUnits[] = {{"", 0},   {"k", 10}, {"K", 10}, {"m", 20},
                                                         {"M", 20}, {"g", 30}, {"G", 30}};
  for (const auto& [name, shift] : kUnits) {
    if (error == std::errc() && unit == name && value < uint64_t{1} << 33)
      return static_cast<size_t>(value) << shift;
  }
  return InvalidArgument("needs a size such as 64k, 64m or 1g, found '{}'", text);
}

}  // namespace moesaic::proxy
