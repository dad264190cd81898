// The flags of `moesaic serve`. Each can be set by the command line, the environment or a file.
#pragma once

#include <string>
#include <vector>

#include "app/flags.h"
#include "app/logging.h"
#include "app/serve_keys.h"
#include "app/session.h"
#include "base/status.h"
#include "server/kv_events.h"
#include "server/server.h"

namespace moesaic::app {

struct ServeFlags {
  ModelFlags model;
  server::HttpOptions http;
  server::RouterOptions router;
  server::ResponseStoreOptions responses;
  text::GrammarLimits grammar_limits;
  text::GrammarPoolOptions grammars;
  std::vector<std::string> names;
  std::string tool_format = "auto", reasoning_format = "auto";
  int64_t kv_bytes = 0;
  int64_t swap_bytes = 0;
  int64_t warm_bytes = 0;
  std::string disk_folder;
  int64_t disk_bytes = engine::DiskOptions().bytes;
  int max_sequences = 16;
  int max_batch_tokens = 512;
  int max_queue = 512;
  uint64_t seed = 0;
  bool prefix_cache = true;
  std::string eviction = "cost";
  server::KvPublisherOptions kv_events;  // no endpoint: disabled
  int drain_seconds = 30;
  KeyFlags keys;
  LogOptions log;
  bool no_access_log = false;
  std::string config;
  bool print_config = false;
};

/// Declares the flags. "--max-queue" is MOESAIC_MAX_QUEUE in the environment and max-queue in a file.
void AddServeFlags(Verb& verb, ServeFlags& flags);

/// Error for an empty key. It must not be read as "no keys", which would open the server to all clients.
inline constexpr const char* kEmptyKey = "api-key is empty";

/// Sets the environment variable of each flag.
void NameEnvironment(Verb& verb);

/// Reads --config, if given, for settings that neither the command line nor the environment has. Fails for
/// unknown keys, and for keys that the environment or the file leaves empty.
Status ReadConfigFile(const Verb& verb, const ServeFlags& flags);

/// Returns all current settings of --config in a form that ReadConfigFile reads.
std::string PrintConfig(const Verb& verb);

/// Returns a model's name from its path: its id in the Hugging Face cache, the folder's name, or the file's
/// name without its extension.
std::string ModelName(const std::string& path);

}  // namespace moesaic::app
