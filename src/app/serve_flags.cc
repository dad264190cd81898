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

// Milliseconds that are given in seconds.
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

// Takes the values of the former switch, too.
std::string AccessLogMode(std::string& mode) {
  if (mode == "true") mode = "no-health";
  if (mode == "false") mode = "off";
  const bool known = mode == "all" || mode == "no-health" || mode == "off";
  return known ? "" : fmt::format("\"{}\" is none of all, no-health, off", mode);
}

// "auto", or a name that `parse` takes.
template <typename Parse>
ValueCheck AutoOr(Parse parse) {
  return [parse](std::string& name) { return name == "auto" ? "" : Message(parse(name).status()); };
}

void AddModelGroup(Verb& verb, ServeFlags& flags) {
  AddModelFlags(verb, flags.model);
  verb.Find("MODEL").NotInConfig();  // --config may not name it, so --print-config doesn't
  AddCacheFlags(verb, flags.model);
  verb.AddOption(
          "--kv-memory", flags.kv_bytes,
          "Memory of the KV cache, e.g. 8GiB; 0: what --max-sequences x context needs, at most a quarter of "
          "what is free")
      .Bytes()
      .ShowDefault();
  verb.AddOption(
          "--swap-space", flags.swap_bytes,
          "Memory beside the KV cache for blocks of requests that had to make room, e.g. 4GiB; 0: they are "
          "computed again")
      .Bytes()
      .ShowDefault();
  verb.AddOption(
          "--kv-warm-memory", flags.warm_bytes,
          "Memory beside the KV cache that keeps blocks which it gives up, in int8, e.g. 8GiB; answers "
          "may then differ from computed ones, unless --kv-dtype is int8; 0: none")
      .Bytes()
      .ShowDefault();
  verb.AddOption("--kv-disk", flags.disk_folder,
                 "Folder for KV blocks, found again when memory had to give them up and after a restart");
  verb.AddOption("--kv-disk-size", flags.disk_bytes, "What its files may take, e.g. 100GiB")
      .Bytes()
      .ShowDefault();
  verb.AddOption("--max-sequences", flags.max_sequences, "Requests that run at once")
      .Range(1, 1 << 16)
      .ShowDefault();
  verb.AddOption("--max-batch-tokens", flags.max_batch_tokens,
                 "Tokens of one step, of prompts and outputs together; at least --max-sequences")
      .Range(1, 1 << 20)
      .ShowDefault();
  verb.AddOption("--seed", flags.seed,
                 "Seed for the sampling of requests without a seed; 0: a random one at each start")
      .ShowDefault();
  verb.AddFlag("--prefix-cache,!--no-prefix-cache", flags.prefix_cache, "Keep computed blocks and share them")
      .DefaultText("true");
  verb.AddOption("--cache-eviction", flags.eviction,
                 "Eviction policy of cached blocks: cost (cheapest to compute again first) or lru (least "
                 "recently used first)")
      .OneOf({"cost", "lru"})
      .ShowDefault();
  verb.AddOption("--served-model-name", flags.names,
                 "Name of the model in requests; default: the folder's name; may be repeated");
  verb.AddOption("--tool-format", flags.tool_format,
                 "How the model writes calls: auto, " + text::ToolFormatNames())
      .Check(AutoOr(text::ParseToolFormat))
      .ShowDefault();
  verb.AddOption("--reasoning-format", flags.reasoning_format,
                 "How it marks thoughts: auto, none, think, pangu")
      .Check(AutoOr(text::ParseReasoningFormat))
      .ShowDefault();
}

// Keys are not printed by --print-config.
void AddKeyFlags(Verb& verb, ServeFlags& flags) {
  const char* group = "Server";
  verb.AddOption("--api-key", flags.keys.api_keys, "A key that requests must bring; may be repeated")
      .Check(CheckKey)
      .OneValue()
      .NotInConfig()
      .Group(group);
  verb.AddOption(
          "--admin-key", flags.keys.admin_keys,
          "A key that may also read /state, /debug/trace and usage by key, and reset the cache; may be "
          "repeated")
      .Check(CheckKey)
      .OneValue()
      .NotInConfig()
      .Group(group);
  verb.AddOption("--api-key-file", flags.keys.file,
                 "File of keys, one a line: name key [role=admin] [requests_per_minute=N] "
                 "[tokens_per_minute=N]; read again at SIGHUP")
      .Group(group);
  verb.AddFlag(
          "--share-prefix-cache", flags.router.share_prefix_cache,
          "Share cached blocks between keys; a client can then tell from cached_tokens what others asked")
      .Group(group);
}

void AddLogGroup(Verb& verb, ServeFlags& flags) {
  const char* group = "Log";
  verb.AddOption("--log-format", flags.log.format, "text, or json: one object a line")
      .OneOf({"text", "json"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--log-level", flags.log.level, "Lowest level that is logged")
      .OneOf({"debug", "info", "warning", "error"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--log-file", flags.log.file,
                 "File to append the log to, opened again at SIGHUP; empty: stderr")
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
  verb.AddOption("--host", flags.http.host, "Address to listen on; 0.0.0.0 or ::: all")
      .ShowDefault()
      .Group(group);
  verb.AddOption("--port", flags.http.port, "Port; 0: any free one")
      .Range(0, 65535)
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--tls-cert", flags.http.tls_certificate,
          "PEM file of the server's certificate and its intermediate authorities: serve https; reloaded "
          "at SIGHUP")
      .Group(group);
  verb.AddOption("--tls-key", flags.http.tls_key,
                 "PEM file of the certificate's private key, without a passphrase")
      .Group(group);
  AddKeyFlags(verb, flags);
  verb.AddOption("--allowed-host", flags.router.browser.allowed_hosts,
                 "Host name that requests may be sent to, besides addresses, localhost, --host and this "
                 "machine's name; *: any; may be repeated")
      .Check(CheckHostName)
      .OneValue()
      .Group(group);
  verb.AddOption("--cors-origin", flags.router.browser.cors_origins,
                 "Origin whose pages may ask, or *; may be repeated")
      .OneValue()
      .Group(group);
  verb.AddOption("--http-threads", flags.http.threads, "Threads for HTTP, JSON and text")
      .Range(1, 256)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--drain-timeout", flags.drain_seconds, "Seconds that requests may finish in after SIGTERM")
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
  verb.AddOption("--max-requests", flags.router.max_requests, "Calls that generate at once; more get 429")
      .Range(1, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-queue", flags.max_queue, "Sequences that wait to run; more get 429")
      .Range(1, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-connections", flags.http.max_connections, "Connections; more get 503")
      .Range(1, kMaxInt)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-body", flags.http.max_body_bytes, "Bytes of one request's body, e.g. 16MiB")
      .Bytes()
      .ShowDefault()
      .Group(group);
  verb.AddOption("--max-bodies", flags.http.max_total_body_bytes, "Bytes of all requests' bodies together")
      .Bytes()
      .ShowDefault()
      .Group(group);
  const auto add_bytes = [&](const char* name, size_t& value, const char* help) {
    verb.AddOption(name, value, help).Bytes().ShowDefault().Group(group);
  };
  add_bytes("--max-regex", flags.grammar_limits.regex_bytes,
            "Bytes of a regex, and of each pattern of a JSON schema, e.g. 16KiB");
  add_bytes("--max-schema", flags.grammar_limits.schema_bytes,
            "Bytes of a JSON schema for structured output, and of the schemas of all forced tools together");
  add_bytes("--max-grammar", flags.grammar_limits.lark_bytes, "Bytes of a Lark grammar");
  add_bytes("--grammar-cache", flags.grammars.cache_bytes,
            "Memory of the cache of compiled grammars, e.g. 64MiB; 0: none");
  verb.AddOption("--grammar-threads", flags.grammars.threads,
                 "Threads that compile grammars, at low priority")
      .Range(1, 256)
      .ShowDefault()
      .Group(group);
  AddSeconds(verb, "--grammar-timeout", flags.grammars.max_time,
             "Seconds of CPU time for compiling a grammar, and for each of its masks");
  verb.AddOptionFunction<int>(
          "--request-timeout",
          [&flags](int seconds) { flags.router.request_timeout = std::chrono::seconds(seconds); },
          "Seconds after which an answer ends with what it has; 0: none")
      .Range(0, kMaxInt)
      .DefaultText("0")
      .Group(group);
  AddSeconds(verb, "--header-timeout", flags.http.header_timeout, "Seconds for a request's header");
  AddSeconds(verb, "--body-timeout", flags.http.body_timeout, "Seconds for its body");
  AddSeconds(verb, "--idle-timeout", flags.http.idle_timeout, "Seconds between requests of a connection");
  AddSeconds(verb, "--write-timeout", flags.http.write_timeout,
             "Seconds for a client to take what it is sent");
  AddSeconds(verb, "--ping-interval", flags.http.ping_interval,
             "Seconds of silence before a stream gets a comment; 0: none");
}

void AddEventsGroup(Verb& verb, ServeFlags& flags) {
  const char* group = "KV events";
  verb.AddOption("--kv-events", flags.kv_events.endpoint,
                 "ZeroMQ address that tells which blocks are cached, as vLLM does, e.g. tcp://*:5557")
      .Group(group);
  verb.AddOption("--kv-events-replay", flags.kv_events.replay_endpoint,
                 "ZeroMQ address that replays missed KV events, e.g. tcp://*:5558")
      .Group(group);
  verb.AddOption("--kv-events-topic", flags.kv_events.topic, "First frame of each message").Group(group);
  verb.AddOption("--kv-events-format", flags.kv_events.format,
                 "How an event is written: array, or map as vLLM does since June 2026")
      .OneOf({"array", "map"})
      .ShowDefault()
      .Group(group);
}

}  // namespace

void AddServeFlags(Verb& verb, ServeFlags& flags) {
  AddModelGroup(verb, flags);
  AddSpeculativeFlags(verb, flags.model);
  AddSparsityFlags(verb, flags.model.sparsity, {"off", "dense", "decode", "all"});
  AddServerGroup(verb, flags);
  AddLogGroup(verb, flags);
  AddLimitsGroup(verb, flags);
  AddEventsGroup(verb, flags);
  verb.AddOption("--config", flags.config, "File of KEY = VALUE lines (TOML), named like the flags")
      .ExistingFile()
      .NotInConfig();
  verb.AddFlag("--print-config", flags.print_config, "Print every setting as a file for --config, and end")
      .NotInConfig();
  NameEnvironment(verb);
  verb.Footer(
      "A flag wins over the environment (--max-queue is MOESAIC_MAX_QUEUE), and that over the file "
      "(max-queue = 512).\n"
      "SIGTERM or Ctrl-C drains: new requests get 503, those on their way finish, and the exit code is 0.\n"
      "SIGHUP reads --api-key-file again, opens --log-file again and never stops the server.\n"
      "docs/server.md tells the rest.\n\n"
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
