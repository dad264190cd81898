#include "server/api_keys.h"

#include <absl/strings/escaping.h>
#include <fmt/format.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <system_error>
#include <utility>

#include "server/http_syntax.h"

namespace moesaic::server {
namespace {

constexpr size_t kMaxNameBytes = 64;
constexpr std::string_view kTenantPrefix = "key:", kSaltPrefix = "salt:";

std::string Digest(std::string_view key) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), digest.data());
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool UsableName(std::string_view name) {
  return name.size() <= kMaxNameBytes && std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
         });
}

Status ParseSetting(std::string_view word, KeyEntry* entry) {
  const size_t equals = std::min(word.find('='), word.size());
  const std::string_view name = word.substr(0, equals);
  const std::string_view value = word.substr(std::min(equals + 1, word.size()));
  if (name == "role") {
    if (value != "admin" && value != "user") {
      return InvalidArgument("role must be admin or user, found \"{}\"", value);
    }
    entry->admin = value == "admin";
    return OkStatus();
  }
  int64_t* limit = name == "requests_per_minute" ? &entry->limits.requests
                   : name == "tokens_per_minute" ? &entry->limits.tokens
                                                 : nullptr;
  if (limit == nullptr) {
    return InvalidArgument(
        "there is no setting \"{}\"; a line is: name key [role=admin] [requests_per_minute=N] "
        "[tokens_per_minute=N]",
        name);
  }
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *limit);
  if (error != std::errc() || end != value.data() + value.size() || *limit < 1) {
    return InvalidArgument("{} must be a whole number of at least 1, found \"{}\"", name, value);
  }
  return OkStatus();
}

std::vector<std::string_view> Words(std::string_view line) {
  std::vector<std::string_view> words;
  for (line = TrimBlanks(line); !line.empty(); line = TrimBlanks(line)) {
    words.push_back(line.substr(0, line.find_first_of(" \t")));
    line.remove_prefix(words.back().size());
  }
  return words;
}

StatusOr<KeyEntry> ParseLine(std::string_view line) {
  const std::vector<std::string_view> words = Words(line);
  KeyEntry entry;
  entry.name = std::string(words[0]);
  if (!UsableName(words[0])) {
    return InvalidArgument("a name has letters, digits, '.', '_' and '-', at most {}, found \"{}\"",
                           kMaxNameBytes, words[0]);
  }
  if (words[0].starts_with("api-key-") || words[0].starts_with("admin-key-")) {
    return InvalidArgument(
        "names that begin with \"api-key-\" or \"admin-key-\" are those of keys from flags");
  }
  if (words.size() < 2)
    return InvalidArgument("\"{}\" has no key; a line is: name key [settings]", entry.name);
  entry.id = entry.name;
  entry.digest = Digest(words[1]);
  for (size_t i = 2; i < words.size(); ++i) {
    RETURN_IF_ERROR(ParseSetting(words[i], &entry));
  }
  return entry;
}

std::string DescribeEntry(const KeyEntry& entry) {
  return entry.line > 0 ? fmt::format("line {}", entry.line) : fmt::format("\"{}\"", entry.name);
}

}  // namespace

KeyEntry UnnamedKey(std::string name, std::string_view key, bool admin) {
  KeyEntry entry{.name = std::move(name), .id = {}, .digest = Digest(key), .admin = admin};
  entry.id = "sha256-" + absl::BytesToHexString(entry.digest.substr(0, 16));
  return entry;
}

StatusOr<std::vector<KeyEntry>> ParseKeyFile(std::string_view text) {
  std::vector<KeyEntry> entries;
  int number = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    line = TrimBlanks(line);
    text.remove_prefix(std::min(end + 1, text.size()));
    // A comment begins a line or follows a space, since a key may contain '#'.
    for (size_t at = line.find('#'); at != std::string_view::npos; at = line.find('#', at + 1)) {
      if (at > 0 && line[at - 1] != ' ' && line[at - 1] != '\t') continue;
      line = TrimBlanks(line.substr(0, at));
      break;
    }
    if (line.empty()) continue;
    auto entry = ParseLine(line);
    if (!entry.ok()) return Annotate(entry.status(), fmt::format("line {}", number));
    entry->line = number;
    entries.push_back(*std::move(entry));
  }
  if (entries.empty()) return InvalidArgument("the file has no key; a line is: name key [settings]");
  RETURN_IF_ERROR(CheckKeys(entries));
  return entries;
}

Status CheckKeys(const std::vector<KeyEntry>& entries) {
  std::map<std::string_view, const KeyEntry*> by_digest, by_name;
  for (const KeyEntry& entry : entries) {
    const auto [same_key, new_key] = by_digest.emplace(entry.digest, &entry);
    if (!new_key) {
      return InvalidArgument("{}: the key is used by {} already", DescribeEntry(entry),
                             DescribeEntry(*same_key->second));
    }
    const auto [same_name, new_name] = by_name.emplace(entry.name, &entry);
    if (!new_name && (same_name->second->admin != entry.admin || same_name->second->limits != entry.limits)) {
      return InvalidArgument("{}: \"{}\" has another role or other limits than in {}", DescribeEntry(entry),
                             entry.name, DescribeEntry(*same_name->second));
    }
  }
  return OkStatus();
}

void KeyRing::Replace(const std::vector<KeyEntry>& entries) {
  const std::lock_guard lock(mutex_);
  by_digest_.clear();
  for (const KeyEntry& entry : entries) {
    std::shared_ptr<Tenant>& tenant = tenants_[{entry.name, entry.id}];
    if (tenant == nullptr) tenant = std::make_shared<Tenant>(entry.name, entry.id);
    tenant->request_bucket.SetLimit(entry.limits.requests);
    tenant->token_bucket.SetLimit(entry.limits.tokens);
    by_digest_[entry.digest] = {tenant, entry.admin};
  }
}

std::optional<KeyHolder> KeyRing::Find(std::string_view key) const {
  if (key.empty()) return std::nullopt;
  // The time of the search depends on the digest only, which does not reveal how much of a key is right.
  const std::string digest = Digest(key);
  const std::lock_guard lock(mutex_);
  const auto found = by_digest_.find(digest);
  if (found == by_digest_.end()) return std::nullopt;
  return found->second;
}

bool KeyRing::has_admin() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(by_digest_.begin(), by_digest_.end(),
                     [](const auto& entry) { return entry.second.admin; });
}

std::vector<std::shared_ptr<const Tenant>> KeyRing::Tenants() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<const Tenant>> all;
  for (const auto& [name, tenant] : tenants_) all.push_back(tenant);
  return all;
}

std::string CacheNamespace(std::string_view tenant_id, std::string salt) {
  if (!tenant_id.empty()) return fmt::format("{}{}/{}", kTenantPrefix, tenant_id, salt);
  const bool ambiguous = salt.starts_with(kTenantPrefix) || salt.starts_with(kSaltPrefix);
  return ambiguous ? fmt::format("{}{}", kSaltPrefix, salt) : salt;
}

std::string KeyMetricsText(const KeyRing* ring) {
  if (ring == nullptr) return "";
  struct Family {
    const char *name, *help;
    const std::atomic<int64_t> Tenant::*value;
  };
  constexpr std::array<Family, 5> kFamilies = {{
      {"requests", "Requests that were admitted, by key", &Tenant::requests},
      {"limited_requests", "Requests that a limit of their key refused", &Tenant::limited},
      {"prompt_tokens", "Prompt tokens, by key", &Tenant::prompt_tokens},
      {"cached_tokens", "Prompt tokens found in the cache, by key", &Tenant::cached_tokens},
      {"generation_tokens", "Tokens generated, by key", &Tenant::output_tokens},
  }};
  const std::vector<std::shared_ptr<const Tenant>> tenants = ring->Tenants();
  std::string text;
  for (const Family& family : kFamilies) {
    text += fmt::format("# HELP moesaic:key_{0}_total {1}\n# TYPE moesaic:key_{0}_total counter\n",
                        family.name, family.help);
    for (const auto& tenant : tenants) {
      text += fmt::format("moesaic:key_{}_total{{key=\"{}\"}} {}\n", family.name, tenant->name,
                          (tenant.get()->*family.value).load());
    }
  }
  return text;
}

}  // namespace moesaic::server
