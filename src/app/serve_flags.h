// The flags of `moesaic serve`, each of which may come from the command line, the environment or a file.
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
  server::KvPublisherOptions kv_events;  // no endpoint: none
  int drain_seconds = 30;
  KeyFlags keys;
  LogOptions log;
  bool no_access_log = false;
  std::string config;
  bool print_config = false;
};

/// Declares them. An option "--max-queue" is MOESAIC_MAX_QUEUE in the environment and max-queue in a file.
void AddServeFlags(Verb& verb, ServeFlags& flags);

/// The error for a key that is empty: neither "no keys" nor a key that lets everybody in.
inline constexpr const char* kEmptyKey = "api-key is empty";

/// Names the environment variable of each flag.
void NameEnvironment(Verb& verb);

/// Reads --config, when given: what neither the command line nor the environment said. An unknown key is
/// refused by name, and so is a key that the environment or the file leaves empty.
Status ReadConfigFile(const Verb& verb, const ServeFlags& flags);

/// All that --config may say, as it is now; ReadConfigFile reads it again.
std::string PrintConfig(const Verb& verb);

/// A model's name from its path: its id in the Hugging Face cache, the folder's name, or the file's name
/// without its extension.
std::string ModelName(const std::string& path);

}  // namespace moesaic::app
