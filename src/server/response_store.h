// Answers of /v1/responses that later requests may go on from, and conversations.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "server/json_fields.h"

namespace moesaic::server {

struct ResponseStoreOptions {
  int most = 1000;              ///< responses kept; 0: none
  int64_t bytes = 256ll << 20;  ///< of their JSON text together; a larger one is not kept
};

struct StoredResponse {
  std::string id;
  std::string owner;  ///< whose key asked; empty where no keys are set
  Json response;      ///< as it was answered; of a conversation: its object
  Json messages;      ///< the conversation up to its end, without "instructions", as templates know it; of a
                      ///< conversation: its items
};

/// Kept in memory, as text, since parsed JSON can take twenty times as much: the oldest go when room is
/// needed. Any thread.
class ResponseStore {
 public:
  explicit ResponseStore(const ResponseStoreOptions& options) : options_(options) {}

  bool keeps() const { return options_.most > 0 && options_.bytes > 0; }
  /// False when it takes more than all memory, or nothing is kept.
  bool Add(StoredResponse stored);
  /// None: there is none of that id, or it is another owner's.
  std::optional<StoredResponse> Find(const std::string& id, const std::string& owner) const;
  enum class Updated { kYes, kUnknown, kTooLarge };
  /// Replaces an entry by what `change` makes of it, under the lock; it becomes the newest. When `change`
  /// returns false, and when the result is too large, the entry stays as it is.
  Updated Update(const std::string& id, const std::string& owner,
                 const std::function<bool(StoredResponse&)>& change);
  /// Whether there was one.
  bool Remove(const std::string& id, const std::string& owner);

 private:
  struct Entry {
    std::string owner, response, messages;
    std::list<std::string>::iterator age;
  };
  using Entries = std::unordered_map<std::string, Entry>;

  static int64_t BytesOf(const Entry& entry) {
    return static_cast<int64_t>(entry.response.size() + entry.messages.size());
  }

  void Erase(Entries::iterator entry);
  bool AddLocked(const std::string& id, Entry entry);

  const ResponseStoreOptions options_;
  mutable std::mutex mutex_;
  Entries entries_;
  std::list<std::string> ages_;  // ids, the oldest first
  int64_t bytes_ = 0;
};

}  // namespace moesaic::server
