#include "proxy/gateway/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>

#include "proxy/gateway/engine_line.h"

namespace moesaic::proxy {
namespace {

using Args = std::span<const std::string_view>;

constexpr uint32_t kDefaultBlockSize = 16;  // of vLLM on GPUs
constexpr uint32_t kMoesaicBlockSize = 64;  // of this project's engine
constexpr uint32_t kMaxBlockSize = 4096;
constexpr uint64_t kMaxPriority = 1'000'000'000;

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

// Engines of a name that is looked up again and again are kept apart.
Status SetEngine(PoolSettings& pool, Args args) {
  ASSIGN_OR_RETURN(std::vector<EngineSettings> ranks, ParseEngine(args));
  uint32_t pod = 0;
  for (const EngineSettings& other : pool.engines) pod = std::max(pod, other.instance.pod + 1);
  for (EngineSettings& one : ranks) {
    one.instance.pod = pod;
    for (const auto* list : {&pool.engines, &pool.named}) {
      for (const EngineSettings& other : *list) {
        if (other.instance.url == one.instance.url && other.instance.dp_rank == one.instance.dp_rank)
          return InvalidArgument("'{}' is listed twice", one.instance.url);
      }
    }
    (one.resolve ? pool.named : pool.engines).push_back(std::move(one));
  }
  return OkStatus();
}

Status SetEtcd(PoolSettings& pool, Args args) {
  if (args.size() < 2 || args[0].empty())
    return InvalidArgument("needs PREFIX and the URLs of etcd's members, found {} values", args.size());
  for (const EtcdSettings& other : pool.etcd) {
    if (other.prefix == args[0])
      return InvalidArgument("the prefix '{}' is listed twice: name all members in one directive", args[0]);
  }
  EtcdSettings etcd{.prefix = std::string(args[0]), .members = {}};
  for (const std::string_view url : args.subspan(1)) {
    EngineSettings member;
    RETURN_IF_ERROR(ParseUrl(url, &member));
    etcd.members.push_back(std::move(member));
  }
  pool.etcd.push_back(std::move(etcd));
  return OkStatus();
}

Status SetMetaserverAllow(PoolSettings& pool, Args args) {
  if (args.empty()) return InvalidArgument("needs addresses or networks, or 'all'");
  for (const std::string_view arg : args) {
    ASSIGN_OR_RETURN(Network network, ParseNetwork(arg));
    pool.metaserver_allow.push_back(network);
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

// KEY [NAME] [rate=TOKENS_PER_SECOND] [burst=TOKENS] [priority=N]; a name may have several words.
StatusOr<ApiKey> ParseKey(Args args) {
  if (args.empty() || args[0].empty()) return InvalidArgument("needs KEY and an optional name");
  ApiKey key{.key = std::string(args[0]), .name = {}, .limit = std::nullopt};
  std::optional<double> burst;
  for (const std::string_view word : args.subspan(1)) {
    const size_t equals = std::min(word.find('='), word.size());
    const std::string_view option = word.substr(0, equals);
    const std::string_view value = word.substr(std::min(equals + 1, word.size()));
    if (option == "rate" || option == "burst") {
      const StatusOr<double> number = ParseReal(value);
      if (!number.ok()) return Annotate(number.status(), std::string(option));
      if (option == "rate") {
        key.limit = TenantLimit{.tokens_per_second = *number};
      } else {
        burst = *number;
      }
    } else if (option == "priority") {
      const StatusOr<uint64_t> number = ParseNumber(value, kMaxPriority);
      if (!number.ok()) return Annotate(number.status(), "priority");
      key.priority = static_cast<int32_t>(*number);
    } else {
      key.name.append(key.name.empty() ? "" : " ").append(word);
    }
  }
  if (burst && !key.limit) return InvalidArgument("burst: needs rate");
  if (key.limit) key.limit->burst_tokens = burst.value_or(key.limit->tokens_per_second);
  return key;
}

Status SetKey(PoolSettings& pool, Args args) {
  ASSIGN_OR_RETURN(ApiKey key, ParseKey(args));
  pool.keys.push_back(std::move(key));
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
    std::vector<std::string_view> words;
    for (size_t at = line.find_first_not_of(" \t"); at != std::string::npos;) {
      const size_t end = std::min(line.find_first_of(" \t", at), line.size());
      words.push_back(std::string_view(line).substr(at, end - at));
      at = line.find_first_not_of(" \t", end);
    }
    ASSIGN_OR_RETURN(ApiKey key, ParseKey(words));
    pool.keys.push_back(std::move(key));
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

Status SetTransferCost(PoolSettings& pool, Args args) {
  if (args.empty() || args.size() > 2)
    return InvalidArgument("needs MICROSECONDS_PER_TOKEN and an optional LATENCY");
  ASSIGN_OR_RETURN(const double micros, ParseReal(args[0]));
  if (micros > 1e6) return InvalidArgument("must be at most 1000000, found '{}'", args[0]);
  pool.policy_options.transfer.nanos_per_token = micros * 1e3;
  if (args.size() > 1) {
    ASSIGN_OR_RETURN(pool.policy_options.transfer.latency, ParseDuration(args[1]));
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
  ASSIGN_OR_RETURN(const uint64_t bound, ParseNumber(args[0], kMaxPriority));
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

constexpr Directive kDirectives[] = {
    {"engine", "URL [OPTION=VALUE ...]", "",
     "Adds an engine. Options: `role=both|prefill|decode`; `dp_ranks=N` data-parallel ranks, each scheduled "
     "by itself; `group=N` (a decode engine is chosen in the group of the prefill engine); `class=N` "
     "(engines of one class share a latency model); `weight=X` relative speed; `max_requests=N`, "
     "`max_prefill_requests=N`, `max_decode_requests=N`, `max_prefill_tokens=N`, `max_decode_tokens=N`, "
     "`kv_blocks=N` hard limits; `batch_tokens=N` tokens that the engine computes in one step (vLLM's "
     "`max_num_batched_tokens`, 8192 without the option); `drain`: the engine finishes its requests and gets "
     "no others; `kv_events=ENDPOINT` (with `bind:` before it the proxy binds and the engine connects), "
     "`kv_replay=ENDPOINT`; `bootstrap_port=N`; `resolve`: one engine for each address of the URL's name, "
     "which nginx's `resolver` looks up again when its answer expires; endpoints of the same host follow.",
     SetEngine},
    {"etcd", "PREFIX URL ...", "",
     "Adds the engines that etcd has below PREFIX: each value is `URL [OPTION=VALUE ...]` as in `engine`, "
     "with an IP address or the option `resolve`. The proxy watches the prefix by the JSON gateway of the "
     "members at URL; while none answers, the engines stay.",
     SetEtcd},
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
     "its bytes, and only prompts of token ids are matched with cached prefixes.",
     SetText<&PoolSettings::model_folder>},
    {"adapters", "NAME ...", "", "Model names that are LoRA adapters: their blocks are separate.",
     SetAdapters},
    {"forward_tokens", "on | off", "on",
     "Sends token ids to engines that accept them, so that these skip their "
     "tokenizer.",
     SetForward},
    {"token_cache", "SIZE", "64m", "Memory of each worker for token ids of prompt segments.",
     SetBytes<&PoolSettings::token_cache_bytes>},
    {"zone", "SIZE", "64m",
     "Shared memory for requests, engines and the prefix index. A KV block takes 29 bytes if at most four "
     "engines have it, otherwise 161, and 29 bytes more for each engine.",
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
    {"slo", "TTFT [TPOT]", "", "Latency targets (TTFT, TPOT) that decide the order of the queue.", SetSlo},
    {"transfer_cost", "MICROSECONDS_PER_TOKEN [LATENCY]", "0 2ms",
     "With separate prefill: time to move the KV of a token to a decode engine, and of a transfer without "
     "tokens. The policy `moesaic` adds them to the predicted time of a prefill engine, for the tokens that "
     "no decode engine of its group has. To the predicted step of a decode engine it adds a hundredth of "
     "the time per token, for the tokens that the engine does not have: an answer is taken to have 100 "
     "tokens.",
     SetTransferCost},
    {"shed", "on | off", "off", "Lets the policy answer 429 to requests that cannot meet the `slo`.",
     SetShed},
    {"skip_prefill", "TOKENS", "256",
     "With separate prefill: prompts with at most this many uncached tokens go to a decode engine at once.",
     SetSkip},
    {"tenant_rate", "TOKENS_PER_SECOND [BURST]", "",
     "Rate of prompt and requested output tokens of each API key; more "
     "get 429.",
     SetTenantRate},
    {"key", "KEY [NAME] [rate=TOKENS_PER_SECOND [burst=TOKENS]] [priority=N]", "",
     "Requests need this key, or another listed one, as `Authorization: Bearer KEY`. `rate` and `burst` "
     "replace `tenant_rate` for the key; requests of keys with a larger `priority` are placed first.",
     SetKey},
    {"key_file", "FILE", "", "Keys, one a line with the arguments of `key`.", SetKeyFile},
    {"pass", "PATH ...", "",
     "More paths that go to an engine without scheduling, besides `/v1/models`, `/health`, `/ping`, "
     "`/version`, `/tokenize` and `/detokenize`; a path that ends with `/` includes all paths below it. "
     "Other paths get 404.",
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
     "for OPEN. Each failure after that time doubles the next one. Failures while it is closed off do not "
     "count.",
     SetBreaker},
    {"health", "off | PATH [INTERVAL [TIMEOUT]]", "/health 5s 2s", "Active health checks.", SetHealth},
    {"metaserver", "URL", "",
     "With `transfer ascend`: URL of the `moesaic_metaserver` location, for the engines.",
     SetText<&PoolSettings::metaserver>},
    {"metaserver_allow", "ADDRESS[/BITS] ... | all", "127.0.0.0/8 ::1",
     "Addresses and networks of engines that may use the `moesaic_metaserver` location; others get 403.",
     SetMetaserverAllow},
};

}  // namespace

std::vector<InstanceConfig> PoolSettings::Instances() const {
  std::vector<InstanceConfig> instances;
  for (const EngineSettings& engine : engines) instances.push_back(engine.instance);
  return instances;
}

std::vector<uint32_t> PoolSettings::Sources() const {
  std::vector<uint32_t> sources;
  for (const EngineSettings& engine : named) sources.push_back(SourceNumber(engine.instance.url));
  for (const EtcdSettings& one : etcd) sources.push_back(SourceNumber(one.prefix));
  return sources;
}

std::span<const Directive> Directives() { return kDirectives; }

Status ApplyDirective(PoolSettings& pool, std::string_view name, Args args) {
  for (const Directive& directive : kDirectives) {
    if (directive.name == name) return Annotate(directive.set(pool, args), std::string(name));
  }
  return InvalidArgument("unknown directive '{}' in moesaic_pool", name);
}

Status FinishPool(PoolSettings& pool) {
  if (pool.engines.empty() && !pool.Discovers())
    return InvalidArgument("moesaic_pool '{}' has no engine", pool.name);
  if (pool.engines.size() > pool.max_instances) {
    return InvalidArgument("moesaic_pool '{}' has {} engines, more than max_engines {}", pool.name,
                           pool.engines.size(), pool.max_instances);
  }
  if (pool.block_size == 0)
    pool.block_size = pool.dialect == Dialect::kMoesaic ? kMoesaicBlockSize : kDefaultBlockSize;
  bool prefill = false, decode = false;
  for (auto* list : {&pool.engines, &pool.named}) {
    for (EngineSettings& engine : *list) {
      const Role role = engine.instance.role;
      prefill = prefill || role != Role::kDecode;
      decode = decode || role != Role::kPrefill;
      RETURN_IF_ERROR(FitToPool(pool, &engine));
      if (engine.resolve || !engine.address.sockaddr.empty()) continue;
      RETURN_IF_ERROR(Resolve(&engine));
    }
  }
  for (EtcdSettings& etcd : pool.etcd) {
    for (EngineSettings& member : etcd.members) RETURN_IF_ERROR(Resolve(&member));
    prefill = decode = true;  // its engines are not known yet
  }
  if (!prefill) return InvalidArgument("moesaic_pool '{}' has no engine that does prefill", pool.name);
  if (!decode) return InvalidArgument("moesaic_pool '{}' has no engine that does decode", pool.name);
  if (pool.transfer == Transfer::kAscend && pool.metaserver.empty()) {
    return InvalidArgument("'transfer ascend' needs 'metaserver'");
  }
  if (pool.metaserver_allow.empty()) {
    for (const char* local : {"127.0.0.0/8", "::1"}) pool.metaserver_allow.push_back(*ParseNetwork(local));
  }
  // SGLang's decode engines compute no prompts.
  if (pool.transfer == Transfer::kSglang) pool.scheduler.skip_prefill_tokens = 0;
  return OkStatus();
}

StatusOr<EngineSettings> EngineOf(const InstanceConfig& config) {
  EngineSettings engine;
  RETURN_IF_ERROR(ParseUrl(config.url, &engine));
  engine.instance = config;
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
  constexpr Nanos kMaxDuration = 1'000'000'000 * kSecond;  // 31 years
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  for (const auto& [name, nanos] : kUnits) {
    if (error == std::errc() && unit == name && value <= static_cast<uint64_t>(kMaxDuration / nanos))
      return static_cast<Nanos>(value) * nanos;
  }
  return InvalidArgument("needs a time such as 250ms, 2s or 5m, of at most 1000000000s, found '{}'", text);
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
