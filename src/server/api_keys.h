// API keys. The holder of a key is a tenant: its cached blocks, stored responses, limits and usage are its
// own.
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

/// Any thread. Lives over reloads of the keys, so that limits and counters go on.
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

  const std::string name;  ///< shown in metrics and logs
  const std::string id;    ///< keeps apart the blocks and responses of tenants, on disk too; has no '/'
  TokenBucket request_bucket, token_bucket;
  std::atomic<int64_t> requests{0};  ///< admitted
  std::atomic<int64_t> limited{0};   ///< refused by a limit of the key
  std::atomic<int64_t> prompt_tokens{0}, cached_tokens{0}, output_tokens{0};
};

/// One key. Two keys may have the same name while a key is rotated; then role and limits must agree.
struct KeyEntry {
  std::string name;
  std::string id;      ///< the tenant's
  std::string digest;  ///< SHA-256 of the key, 32 bytes; the key itself is not kept
  bool admin = false;
  RateLimits limits = {};
  int line = 0;  ///< of the key file; 0: from a flag
};

/// A key that came without a name. `name` is shown; the tenant's id is made of the key's digest, so that it
/// does not depend on the order of flags.
KeyEntry UnnamedKey(std::string name, std::string_view key, bool admin);

/// Parses lines of `name key [role=admin] [requests_per_minute=N] [tokens_per_minute=N]`. '#' begins a
/// comment; empty lines are skipped. Errors name the line.
StatusOr<std::vector<KeyEntry>> ParseKeyFile(std::string_view text);

/// Refuses a key that occurs twice, and keys of one name whose role or limits differ.
Status CheckKeys(const std::vector<KeyEntry>& entries);

struct KeyHolder {
  std::shared_ptr<Tenant> tenant;
  bool admin = false;
};

/// The keys in force. Any thread.
class KeyRing {
 public:
  explicit KeyRing(const std::vector<KeyEntry>& entries) { Replace(entries); }

  /// `entries` have passed CheckKeys. Tenants whose name and id stay keep their counters and buckets.
  void Replace(const std::vector<KeyEntry>& entries);
  /// The holder of `key`; none for an empty or unknown one.
  std::optional<KeyHolder> Find(std::string_view key) const;
  bool has_admin() const;
  /// All tenants since the start, those without a key left included, by name.
  std::vector<std::shared_ptr<const Tenant>> Tenants() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, KeyHolder> by_digest_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Tenant>> tenants_;  // by name and id
};

/// The namespace of cached blocks of a request with `salt`. `tenant_id` is empty where tenants share blocks.
/// Different pairs have different namespaces, so that no salt finds another tenant's blocks.
std::string CacheNamespace(std::string_view tenant_id, std::string salt);

/// Usage by key, as Prometheus' text format has it; `ring` may be null.
std::string KeyMetricsText(const KeyRing* ring);

}  // namespace moesaic::server
