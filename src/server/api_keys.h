// API keys and their holders. Each holder of a key is a tenant with its own cached blocks, stored responses,
// limits and usage counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/rate_limit.h"

namespace moesaic::server {

/// The holder of a key. Any thread may use it. It survives reloads of the keys, so that limits and counters
/// continue.
struct Tenant {
  Tenant(std::string name, std::string id) : name(std::move(name)), id(std::move(id)) {}

  void ChargePrompt(int64_t tokens) {
    prompt_tokens += tokens;
    token_bucket.Charge(tokens);
  }
  void ChargeOutput() {
    ++output_tokens;
    token_bucket.Charge(1);
  }

  const std::string name;  ///< name in metrics and logs
  const std::string id;    ///< namespace of the tenant's blocks and responses, also on disk; has no '/'
  TokenBucket request_bucket, token_bucket;
  std::atomic<int64_t> requests{0};  ///< number of admitted requests
  std::atomic<int64_t> limited{0};   ///< number of requests that a limit of the key refused
  std::atomic<int64_t> prompt_tokens{0}, cached_tokens{0}, output_tokens{0};
};

/// One key. While a key is rotated, two keys may have the same name; their role and limits must be equal.
struct KeyEntry {
  std::string name;
  std::string id;      ///< id of the tenant
  std::string digest;  ///< SHA-256 of the key, 32 bytes; the key itself is not stored
  bool admin = false;
  RateLimits limits = {};
  int line = 0;  ///< line of the key file; 0 for a key from a flag
};

/// Returns an entry for a key that was given without a name. The tenant's id is made of the key's digest, so
/// that it does not depend on the order of flags. `name` appears in metrics and logs.
KeyEntry UnnamedKey(std::string name, std::string_view key, bool admin);

/// Parses lines of `name key [role=admin] [requests_per_minute=N] [tokens_per_minute=N]`. Skips empty lines
/// and comments, which begin with '#'. Errors name the line.
StatusOr<std::vector<KeyEntry>> ParseKeyFile(std::string_view text);

/// Refuses a key that occurs twice, and keys of one name whose role or limits differ.
Status CheckKeys(const std::vector<KeyEntry>& entries);

struct KeyHolder {
  std::shared_ptr<Tenant> tenant;
  bool admin = false;
};

/// The valid keys. Any thread may call all methods.
class KeyRing {
 public:
  explicit KeyRing(const std::vector<KeyEntry>& entries) { Replace(entries); }

  /// Replaces the keys by `entries`, which CheckKeys has accepted. Tenants whose name and id do not change
  /// keep their counters and buckets.
  void Replace(const std::vector<KeyEntry>& entries);
  /// Returns the holder of `key`, or nothing for an empty or unknown key.
  std::optional<KeyHolder> Find(std::string_view key) const;
  bool has_admin() const;
  /// Returns all tenants since the start, sorted by name, including those that have no key any more.
  std::vector<std::shared_ptr<const Tenant>> Tenants() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, KeyHolder> by_digest_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Tenant>> tenants_;  // by name and id
};

/// Returns the namespace of cached blocks of a request with `salt`. `tenant_id` is empty where tenants share
/// blocks. Different pairs have different namespaces, so that no salt finds another tenant's blocks.
std::string CacheNamespace(std::string_view tenant_id, std::string salt);

/// Returns the usage by key in Prometheus' text format. `ring` may be null.
std::string KeyMetricsText(const KeyRing* ring);

}  // namespace moesaic::server
