#include "app/serve_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "app/hub_cache.h"
#include "app/sparsity_flags.h"
#include "app/speculative_flags.h"
#include "text/reasoning.h"
#include "text/tool_calls.h"

namespace moesaic::app {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

// Declares a flag in seconds for a value in milliseconds.
void AddSeconds(Verb& verb, const char* name, std::chrono::milliseconds& value, const char* help) {
  verb.AddOptionFunction<double>(
          name,
          [&value](double seconds) {
            value = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
          },
          help)
      .Range(0.0, 1e6)
      .DefaultText(fmt::format("{}", static_cast<double>(value.count()) / 1000))
      .Group("Limits");
}

std::string CheckKey(const std::string& key) { return key.empty() ? kEmptyKey : ""; }

std::string CheckHostName(const std::string& name) {
  const bool usable = !name.empty() && name.find_first_of("/ ") == std::string::npos;
  return usable
             ? ""
             : fmt::format("\"{}\" is no host name: give it without scheme and path, as example.org", name);
}

// Also accepts the values of the former switch.
std::string AccessLogMode(std::string& mode) {
  if (mode == "true") mode = "no-health";
  if (mode == "false") mode = "off";
  const bool known = mode == "all" || mode == "no-health" || mode == "off";
  return known ? "" : fmt::format("\"{}\" is not all, no-health or off", mode);
}

// Accepts "auto" or a name that `parse` accepts.
template <typename Parse>
ValueCheck AutoOr(Parse parse) {
  return [parse](std::string& name) { return name == "auto" ? "" : Message(parse(name).status()); };
}

void AddModelGroup(Verb& verb, ServeFlags& flags) {
  AddModelFlags(verb, flags.model, /*answers=*/true);
  verb.Find("MODEL").NotInConfig();  // MODEL is not a setting of --config
  AddCacheFlags(verb, flags.model);
  verb.AddOption(
          "--kv-memory", flags.kv_bytes,
          "Memory of the KV cache, e.g. 8GiB; 0: enough for --max-sequences x context, at most a quarter of "
          "the free memory")
      .Bytes()
      .ShowDefault();
  verb.AddOption("--swap-space", flags.swap_bytes,
                 "Additional memory for KV blocks of preempted requests, e.g. 4GiB; 0: these are "
                 "recomputed")
      .Bytes()
      .ShowDefault();
  verb.AddOption("--kv-warm-memory", flags.warm_bytes,
                 "Additional memory for evicted KV blocks in int8, e.g. 8GiB; answers "
                 "may then differ slightly, unless --kv-dtype is int8; 0: none")
      .Bytes()
      .ShowDefault();
  verb.AddOption("--kv-disk", flags.disk_folder,
                 "Folder that stores KV blocks for use after eviction and after a restart");
  verb.AddOption("--kv-disk-size", flags.disk_bytes, "Maximum size of the files in --kv-disk, e.g. 100GiB")
      .Bytes()
      .ShowDefault();
  verb.AddOption("--max-sequences", flags.max_sequences, "Maximum number of requests that run at once")
      .Range(1, 1 << 16)
      .ShowDefault();
  verb.AddOption("--max-batch-tokens", flags.max_batch_tokens,
                 "Maximum tokens of one step, prompts and outputs together; at least --max-sequences")
      .Range(1, 1 << 20)
      .ShowDefault();
  verb.AddOption("--seed", flags.seed, "Seed for requests without one; 0: random at each start")
      .ShowDefault();
  verb.AddFlag("--prefix-cache,!--no-prefix-cache", flags.prefix_cache,
               "Keep computed KV blocks and share them between requests")
      .DefaultText("true");
  verb.AddOption("--cache-eviction", flags.eviction,
                 "Eviction policy of cached blocks: cost (cheapest to recompute first) or lru (least "
                 "recently used first)")
      .OneOf({"cost", "lru"})
      .ShowDefault();
  verb.AddOption("--served-model-name", flags.names,
                 "Model name in requests; default: the folder's name; can be repeated");
  verb.AddOption("--tool-format", flags.tool_format,
                 "Format of the model's tool calls: auto, " + text::ToolFormatNames())
      .Check(AutoOr(text::ParseToolFormat))
      .ShowDefault();
  verb.AddOption("--reasoning-format", flags.reasoning_format,
                 "Format of the model's reasoning: auto, none, think, pangu")
      .Check(AutoOr(text::ParseReasoningFormat))
      .ShowDefault();
}

// --print-config does not print keys.
void AddKeyFlags(Verb& verb, ServeFlags& flags) {
  const char* group = "Server";
  verb.AddOption("--api-key", flags.keys.api_keys, "API key that requests must present; can be repeated")
      .Check(CheckKey)
      .OneValue()
      .NotInConfig()
      .Group(group);
  verb.AddOption("--admin-key", flags.keys.admin_keys,
                 "API key that may also read /state, /expert_load, /debug/trace and usage by key, and reset "
                 "the cache; can be repeated")
      .Check(CheckKey)
      .OneValue()
      .NotInConfig()
      .Group(group);
  verb.AddOption("--api-key-file", flags.keys.file,
                 "File of API keys, one per line: name key [role=admin] [requests_per_minute=N] "
                 "[tokens_per_minute=N]; read again at SIGHUP")
      .Group(group);
  verb.AddFlag(
          "--share-prefix-cache", flags.router.share_prefix_cache,
          "Share cached KV blocks between API keys; cached_tokens then reveals the prompts of other keys")
      .Group(group);
}

void AddLogGroup(Verb& verb, ServeFlags& flags) {
  const char* group = "Log";
  verb.AddOption("--log-format", flags.log.format, "Log format: text, or json (one object per line)")
      .OneOf({"text", "json"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--log-level", flags.log.level, "Lowest level to log")
      .OneOf({"debug", "info", "warning", "error"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--log-file", flags.log.file, "File to append the log to, reopened at SIGHUP; empty: stderr")
      .Group(group);
  verb.AddOption("--access-log", flags.log.access,
                 "Requests to log at level info: all; no-health: without successful probes, scrapes and "
                 "polling of the page; off")
      .Transform(AccessLogMode)
      .ShowDefault()
      .Group(group);
  verb.AddFlag("--no-access-log", flags.no_access_log, "The same as --access-log off").Group(group);
}

void AddServerGroup(Verb& verb, ServeFlags& flags) {
  const char* group = "Server";
  verb.AddOption("--host", flags.http.host, "Address to listen on; all addresses: 0.0.0.0, or :: with IPv6")
      .ShowDefault()
      .Group(group);
  verb.AddOption("--port", flags.http.port, "Port to listen on; 0: any free port")
      .Range(0, 65535)
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--tls-cert", flags.http.tls_certificate,
          "PEM file of the server's certificate and its intermediate authorities, to serve https; reloaded "
          "at SIGHUP")
      .Group(group);
  verb.AddOption("--tls-key", flags.http.tls_key,
                 "PEM file of the certificate's private key, without a passphrase")
      .Group(group);
  AddKeyFlags(verb, flags);
  verb.AddOption("--allowed-host", flags.router.browser.allowed_hosts,
                 "Host name accepted in requests, in addition to addresses, localhost, --host and this "
                 "machine's name; *: any; can be repeated")
      .Check(CheckHostName)
      .OneValue()
      .Group(group);
  verb.AddOption("--cors-origin", flags.router.browser.cors_origins,
                 "Origin (CORS) whose pages may send requests, or *; can be repeated")
      .OneValue()
      .Group(group);
  verb.AddOption("--http-threads", flags.http.threads, "Number of threads for HTTP, JSON and text")
      .Range(1, 256)
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--drain-timeout", flags.drain_seconds,
          "Seconds for running requests to finish after SIGTERM, and for clients to read errors after a "
          "rank failed")
      .Range(0, 86400)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-stored-responses", flags.responses.most,
                 "Maximum number of stored responses and conversations; 0 disables storing")
      .Range(0, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--stored-responses-memory", flags.responses.bytes,
                 "Memory limit for stored responses and conversations, e.g. 256MiB")
      .Bytes()
      .ShowDefault()
      .Group(group);
}

void AddLimitsGroup(Verb& verb, ServeFlags& flags) {
  const char* group = "Limits";
  verb.AddOption("--max-requests", flags.router.max_requests,
                 "Maximum number of concurrent generation calls; more get 429")
      .Range(1, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-queue", flags.max_queue,
                 "Maximum number of waiting sequences; more get 429. One client may have at most as many as "
                 "places are free: half if it is alone")
      .Range(1, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-connections", flags.http.max_connections,
                 "Maximum number of connections; a further one replaces the oldest idle one, or gets 503")
      .Range(1, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-body", flags.http.max_body_bytes, "Maximum size of a request's body, e.g. 16MiB")
      .Bytes()
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-bodies", flags.http.max_total_body_bytes,
                 "Maximum total size of bodies that have arrived and are not handled yet; more get 503")
      .Bytes()
      .ShowDefault()
      .Group(group);
  const auto add_bytes = [&](const char* name, size_t& value, const char* help) {
    verb.AddOption(name, value, help).Bytes().ShowDefault().Group(group);
  };
  add_bytes("--max-regex", flags.grammar_limits.regex_bytes,
            "Maximum size of a regex, and of each pattern of a JSON schema, e.g. 16KiB");
  add_bytes("--max-schema", flags.grammar_limits.schema_bytes,
            "Maximum size of a JSON schema, and of the schemas of all forced tools together");
  add_bytes("--max-grammar", flags.grammar_limits.lark_bytes, "Maximum size of a Lark grammar");
  add_bytes("--grammar-cache", flags.grammars.cache_bytes,
            "Memory of the cache of compiled grammars, e.g. 64MiB; 0: none");
  verb.AddOption("--grammar-threads", flags.grammars.threads,
                 "Number of low-priority threads that compile grammars")
      .Range(1, 256)
      .ShowDefault()
      .Group(group);
  AddSeconds(verb, "--grammar-timeout", flags.grammars.max_time,
             "Maximum CPU seconds for compiling a grammar, and for each of its masks");
  verb.AddOptionFunction<int>(
          "--request-timeout",
          [&flags](int seconds) { flags.router.request_timeout = std::chrono::seconds(seconds); },
          "Seconds after which an answer ends with its output so far; 0: no limit")
      .Range(0, kMaxInt)
      .DefaultText("0")
      .Group(group);
  AddSeconds(verb, "--header-timeout", flags.http.header_timeout,
             "Maximum seconds to receive a request's header");
  AddSeconds(verb, "--body-timeout", flags.http.body_timeout, "Maximum seconds to receive a request's body");
  AddSeconds(verb, "--idle-timeout", flags.http.idle_timeout,
             "Maximum seconds between requests of a connection");
  AddSeconds(verb, "--write-timeout", flags.http.write_timeout,
             "Maximum seconds for a client to receive sent data");
  AddSeconds(verb, "--ping-interval", flags.http.ping_interval,
             "Seconds without output before a stream gets a keep-alive comment; 0: none");
}

void AddEventsGroup(Verb& verb, ServeFlags& flags) {
  const char* group = "KV events";
  verb.AddOption("--kv-events", flags.kv_events.endpoint,
                 "ZeroMQ address that publishes cached blocks (KV events), as vLLM does, e.g. tcp://*:5557")
      .Group(group);
  verb.AddOption("--kv-events-replay", flags.kv_events.replay_endpoint,
                 "ZeroMQ address that replays missed KV events, e.g. tcp://*:5558")
      .Group(group);
  verb.AddOption("--kv-events-topic", flags.kv_events.topic, "Topic, the first frame of each message")
      .Group(group);
  verb.AddOption("--kv-events-format", flags.kv_events.format,
                 "Encoding of events: array, or map as in vLLM since June 2026")
      .OneOf({"array", "map"})
      .ShowDefault()
      .Group(group);
}

}  // namespace

void AddServeFlags(Verb& verb, ServeFlags& flags) {
  // The help shows groups in this order.
  AddServerGroup(verb, flags);
  AddLimitsGroup(verb, flags);
  AddLogGroup(verb, flags);
  AddModelGroup(verb, flags);
  AddSpeculativeFlags(verb, flags.model);
  AddSparsityFlags(verb, flags.model.sparsity, {"off", "dense", "decode", "all"});
  AddEventsGroup(verb, flags);
  verb.AddOption("--config", flags.config,
                 "Settings file of KEY = VALUE lines (TOML), with keys named like the flags")
      .ExistingFile()
      .NotInConfig();
  verb.AddFlag("--print-config", flags.print_config, "Print every setting as a file for --config, and exit")
      .NotInConfig();
  NameEnvironment(verb);
  verb.Footer(
      "A flag overrides the environment (--max-queue is MOESAIC_MAX_QUEUE). The environment\n"
      "overrides the file (max-queue = 512).\n"
      "SIGTERM or Ctrl-C drains: new requests get 503, running ones finish, and the exit code is 0.\n"
      "SIGHUP reloads --api-key-file, --tls-cert and --tls-key, and reopens --log-file.\n"
      "It never stops the server.\n"
      "docs/server.md describes the details.\n\n"
      "Examples:\n"
      "  moesaic serve models/moesaic-tiny\n"
      "  moesaic serve model/ --host 0.0.0.0 --api-key \"$KEY\" --max-sequences 32 --kv-memory 8GiB\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
      "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'");
}

std::string ModelName(const std::string& path) {
  if (std::string id = HubIdOf(path); !id.empty()) return id;
  std::filesystem::path name(path);
  if (!name.has_filename()) name = name.parent_path();
  return std::filesystem::is_directory(path) ? name.filename().string() : name.stem().string();
}

}  // namespace moesaic::app
