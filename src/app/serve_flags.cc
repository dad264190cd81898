#include "app/serve_flags.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>

#include "app/config_file.h"
#include "app/hub_cache.h"
#include "app/sparsity_flags.h"
#include "app/speculative_flags.h"
#include "text/file.h"
#include "text/reasoning.h"
#include "text/tool_calls.h"

namespace moesaic::app {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

// Milliseconds that are given in seconds.
void AddSeconds(CLI::App& verb, const char* name, std::chrono::milliseconds& value, const char* help) {
  verb.add_option_function<double>(
          name,
          [&value](double seconds) {
            value = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
          },
          help)
      ->check(CLI::Range(0.0, 1e6))
      ->default_str(fmt::format("{}", static_cast<double>(value.count()) / 1000))
      ->group("Limits");
}

// An empty key is one that was forgotten: it must neither let everybody in nor pass for none.
constexpr const char* kEmptyKey = "api-key is empty";
std::string CheckKey(const std::string& key) { return key.empty() ? kEmptyKey : ""; }

// "auto", or a name that `parse` takes.
template <typename Parse>
CLI::Validator AutoOr(Parse parse) {
  return CLI::Validator(
      [parse](std::string& name) { return name == "auto" ? "" : Message(parse(name).status()); }, "");
}

void AddModelGroup(CLI::App& verb, ServeFlags& flags) {
  AddModelFlags(verb, flags.model);
  verb.get_option("MODEL")->configurable(false);  // --config may not name it, so --print-config doesn't
  AddCacheFlags(verb, flags.model);
  verb.add_option(
          "--kv-memory", flags.kv_bytes,
          "Memory of the KV cache, e.g. 8GiB; 0: what --max-sequences x context needs, at most a quarter of "
          "what is free")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str();
  verb.add_option(
          "--swap-space", flags.swap_bytes,
          "Memory beside the KV cache for blocks of requests that had to make room, e.g. 4GiB; 0: they are "
          "computed again")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str();
  verb.add_option(
          "--kv-warm-memory", flags.warm_bytes,
          "Memory beside the KV cache that keeps blocks which it gives up, in int8, e.g. 8GiB; answers "
          "may then differ from computed ones, unless --kv-dtype is int8; 0: none")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str();
  verb.add_option("--kv-disk", flags.disk_folder,
                  "Folder for KV blocks, found again when memory had to give them up and after a restart");
  verb.add_option("--kv-disk-size", flags.disk_bytes, "What its files may take, e.g. 100GiB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str();
  verb.add_option("--max-sequences", flags.max_sequences, "Requests that run at once")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  verb.add_option("--max-batch-tokens", flags.max_batch_tokens,
                  "Tokens of one step, of prompts and outputs together; at least --max-sequences")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb.add_option("--seed", flags.seed,
                  "Seed for the sampling of requests without a seed; 0: a random one at each start")
      ->capture_default_str();
  verb.add_flag("--prefix-cache,!--no-prefix-cache", flags.prefix_cache,
                "Keep computed blocks and share them")
      ->default_str("true");
  verb.add_option("--cache-eviction", flags.eviction,
                  "Which cached blocks go first: cost (what it would take to compute "
                  "them again) or lru (the longest unused)")
      ->check(CLI::IsMember({"cost", "lru"}))
      ->capture_default_str();
  verb.add_option("--served-model-name", flags.names,
                  "What requests call the model; default: the folder's name");
  verb.add_option("--tool-format", flags.tool_format,
                  "How the model writes calls: auto, " + text::ToolFormatNames())
      ->check(AutoOr(text::ParseToolFormat))
      ->capture_default_str();
  verb.add_option("--reasoning-format", flags.reasoning_format,
                  "How it marks thoughts: auto, none, think, pangu")
      ->check(AutoOr(text::ParseReasoningFormat))
      ->capture_default_str();
}

void AddServerGroup(CLI::App& verb, ServeFlags& flags) {
  const char* group = "Server";
  verb.add_option("--host", flags.http.host, "Address to listen on; 0.0.0.0 or ::: all")
      ->capture_default_str()
      ->group(group);
  verb.add_option("--port", flags.http.port, "Port; 0: any free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str()
      ->group(group);
  // Not printed by --print-config.
  verb.add_option("--api-key", flags.router.api_keys, "A key that requests must bring; may be repeated")
      ->check(CLI::Validator(CheckKey, ""))
      ->allow_extra_args(false)
      ->configurable(false)
      ->group(group);
  verb.add_option("--cors-origin", flags.router.cors_origins,
                  "Origin whose pages may ask, or *; may be repeated")
      ->allow_extra_args(false)
      ->group(group);
  verb.add_option("--http-threads", flags.http.threads, "Threads for HTTP, JSON and text")
      ->check(CLI::Range(1, 256))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--drain-timeout", flags.drain_seconds, "Seconds that requests may finish in after SIGTERM")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--max-stored-responses", flags.responses.most,
                  "Answers of /v1/responses kept for previous_response_id; 0: none")
      ->check(CLI::Range(0, kMaxInt))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--stored-responses-memory", flags.responses.bytes, "And how much of them, e.g. 256MiB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str()
      ->group(group);
  verb.add_flag("--access-log,!--no-access-log", flags.access_log, "Log every request")
      ->default_str("true")
      ->group(group);
}

void AddLimitsGroup(CLI::App& verb, ServeFlags& flags) {
  const char* group = "Limits";
  verb.add_option("--max-requests", flags.router.max_requests, "Calls that generate at once; more get 429")
      ->check(CLI::Range(1, kMaxInt))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--max-queue", flags.max_queue, "Sequences that wait to run; more get 429")
      ->check(CLI::Range(1, kMaxInt))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--max-connections", flags.http.max_connections, "Connections; more get 503")
      ->check(CLI::Range(1, kMaxInt))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--max-body", flags.http.max_body_bytes, "Bytes of one request's body, e.g. 16MiB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str()
      ->group(group);
  verb.add_option("--max-bodies", flags.http.max_total_body_bytes, "Bytes of all requests' bodies together")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->capture_default_str()
      ->group(group);
  verb.add_option_function<int>(
          "--request-timeout",
          [&flags](int seconds) { flags.router.request_timeout = std::chrono::seconds(seconds); },
          "Seconds after which an answer ends with what it has; 0: none")
      ->check(CLI::Range(0, kMaxInt))
      ->default_str("0")
      ->group(group);
  AddSeconds(verb, "--header-timeout", flags.http.header_timeout, "Seconds for a request's header");
  AddSeconds(verb, "--body-timeout", flags.http.body_timeout, "Seconds for its body");
  AddSeconds(verb, "--idle-timeout", flags.http.idle_timeout, "Seconds between requests of a connection");
  AddSeconds(verb, "--write-timeout", flags.http.write_timeout,
             "Seconds for a client to take what it is sent");
  AddSeconds(verb, "--ping-interval", flags.http.ping_interval,
             "Seconds of silence before a stream gets a comment; 0: none");
}

void AddEventsGroup(CLI::App& verb, ServeFlags& flags) {
  const char* group = "KV events";
  verb.add_option("--kv-events", flags.kv_events.endpoint,
                  "ZeroMQ address that tells which blocks are cached, as vLLM does, e.g. tcp://*:5557")
      ->group(group);
  verb.add_option("--kv-events-replay", flags.kv_events.replay_endpoint,
                  "And one that repeats them, e.g. tcp://*:5558")
      ->group(group);
  verb.add_option("--kv-events-topic", flags.kv_events.topic, "First frame of each message")->group(group);
  verb.add_option("--kv-events-format", flags.kv_events.format,
                  "How an event is written: array, or map as vLLM does since June 2026")
      ->check(CLI::IsMember({"array", "map"}))
      ->capture_default_str()
      ->group(group);
}

std::string EnvironmentName(std::string name) {
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return "MOESAIC_" + name;
}

}  // namespace

void AddServeFlags(CLI::App& verb, ServeFlags& flags) {
  AddModelGroup(verb, flags);
  AddSpeculativeFlags(verb, flags.model);
  AddSparsityFlags(verb, flags.model.sparsity, {"off", "dense", "decode", "all"});
  AddServerGroup(verb, flags);
  AddLimitsGroup(verb, flags);
  AddEventsGroup(verb, flags);
  verb.add_option("--config", flags.config, "File of KEY = VALUE lines (TOML), named like the flags")
      ->check(CLI::ExistingFile)
      ->configurable(false);
  verb.add_flag("--print-config", flags.print_config, "Print every setting as a file for --config, and end")
      ->configurable(false);
  for (CLI::Option* option : verb.get_options()) {
    if (option->get_lnames().empty() || option->check_lname("help")) continue;
    option->envname(EnvironmentName(option->get_lnames().front()));
  }
  verb.footer(
      "A flag wins over the environment (--max-queue is MOESAIC_MAX_QUEUE), and that over the file "
      "(max-queue = 512).\n"
      "SIGTERM or Ctrl-C drains: new requests get 503, those on their way finish, and the exit code is 0.\n"
      "SIGHUP reloads files that may change and never stops the server.\n"
      "docs/server.md tells the rest.\n\n"
      "Examples:\n"
      "  moesaic serve models/moesaic-tiny\n"
      "  moesaic serve model/ --host 0.0.0.0 --api-key \"$KEY\" --max-sequences 32 --kv-memory 8GiB\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
      "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'");
}

Status ReadConfigFile(CLI::App& verb, const ServeFlags& flags) {
  // CLI11 passes over what the environment sets to nothing.
  const CLI::Option* keys = verb.get_option("--api-key");
  const char* given = std::getenv(keys->get_envname().c_str());
  if (keys->count() == 0 && given != nullptr && *given == '\0') {
    return InvalidArgument("{}: {}", keys->get_envname(), kEmptyKey);
  }
  if (flags.config.empty()) return OkStatus();
  const std::string& file = flags.config;
  ASSIGN_OR_RETURN(const std::string text, text::ReadFile(file));
  auto entries = ParseConfig(text);
  if (!entries.ok()) return Annotate(entries.status(), file);
  std::map<const CLI::Option*, const ConfigEntry*> said;  // an option may have two names
  for (const ConfigEntry& entry : *entries) {
    CLI::Option* option = verb.get_option_no_throw("--" + entry.key);
    if (option == nullptr || option->get_lnames().empty() || entry.key == "config" ||
        entry.key == "print-config") {
      return InvalidArgument("{}: there is no setting \"{}\"", file, entry.key);
    }
    if (const auto [it, first] = said.emplace(option, &entry); !first) {
      return InvalidArgument("{}: line {}: \"{}\" was set as \"{}\" in line {} already", file, entry.line,
                             entry.key, it->second->key, it->second->line);
    }
    if (option->count() > 0) continue;
    std::vector<std::string> inputs = entry.values;
    // As PrintConfig writes what is not set.
    if (option->get_configurable() && inputs == std::vector<std::string>{""}) continue;
    try {
      if (option->get_items_expected_max() == 0 && inputs.size() == 1) {
        inputs = {option->get_flag_value(entry.key, inputs.front())};
      }
      option->add_result(inputs);
      option->run_callback();
    } catch (const CLI::Error& error) {
      return InvalidArgument("{}: {}", file, error.what());
    }
  }
  return OkStatus();
}

std::string PrintConfig(const CLI::App& verb) {
  std::string text = fmt::format("# {}\n", verb.get_description());
  for (const std::string& group : verb.get_groups()) {
    for (const CLI::Option* option : verb.get_options()) {
      if (!option->get_configurable() || option->get_group() != group) continue;
      std::vector<std::string> values = option->reduced_results();
      if (values.empty()) {
        const bool unset_flag = option->get_default_str().empty() && option->get_expected_min() == 0;
        values = {unset_flag ? "false" : option->get_default_str()};
      }
      for (std::string& value : values) value = ConfigValue(value);
      text += fmt::format("\n# {}\n{} = {}\n", option->get_description(), option->get_single_name(),
                          values.size() == 1 ? values.front() : fmt::format("[{}]", fmt::join(values, ", ")));
    }
  }
  return text;
}

std::string ModelName(const std::string& path) {
  if (std::string id = HubIdOf(path); !id.empty()) return id;
  std::filesystem::path name(path);
  if (!name.has_filename()) name = name.parent_path();
  return std::filesystem::is_directory(path) ? name.filename().string() : name.stem().string();
}

}  // namespace moesaic::app
