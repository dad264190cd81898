// Stores the responses of /v1/responses for later requests, and conversations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "server/json_fields.h"
#include "server/stored_items.h"

namespace moesaic::server {

struct ResponseStoreOptions {
  int most = 1000;              ///< Maximum number of responses and conversations; 0 stores none.
  int64_t bytes = 256ll << 20;  ///< Maximum bytes of their JSON text.
  /// Maximum bytes of one entry. A request that continues or changes an entry parses it whole, and parsed
  /// JSON can take twenty times as much memory. A larger entry is not stored.
  int64_t entry_bytes = 16ll << 20;
};

struct StoredResponse {
  std::string id;
  std::string owner;             ///< Holder of the request's API key; empty where no keys are set.
  Json response;                 ///< The answer as it was sent, or the conversation object.
  Json messages;                 ///< Messages up to the end of the response, without "instructions", in the
                                 ///< form that chat templates read. For a conversation: its items.
  Json input = Json::array();    ///< Input items of the response.
  bool is_conversation = false;  ///< False for a response.
};

/// The text of an entry. Its members are those of StoredResponse.
struct StoredText {
  std::string response;
  StoredItems messages, input;
  bool is_conversation = false;

  int64_t bytes() const {
    return static_cast<int64_t>(response.size() + messages.json().size() + input.json().size());
  }
};

/// Keeps entries in memory as text, since parsed JSON can take twenty times as much. When memory is needed,
/// it evicts the least recently used entry of the owner that holds most. So no owner can evict the entries of
/// one that holds less. Any thread may call all methods. The lock is not held while JSON is parsed and
/// printed.
class ResponseStore {
 public:
  explicit ResponseStore(const ResponseStoreOptions& options)
      : options_(options), entry_bytes_(std::min(options.bytes, options.entry_bytes)) {}

  /// Returns false if the options store nothing.
  bool keeps() const { return options_.most > 0 && options_.bytes > 0; }

  /// Returns false when the entry does not fit even after the owner's other entries would be evicted.
  bool Add(StoredResponse stored);

  /// Marks the entry as recently used. Returns nothing for an unknown id and for another owner's entry.
  std::optional<StoredResponse> Find(const std::string& id, const std::string& owner);

  /// Like Find(), but calls `read` with the text, which is not parsed. Holds the lock meanwhile, so that
  /// `read` should only search and copy. Does not call it for an unknown id and for another owner's entry.
  void Read(const std::string& id, const std::string& owner,
            const std::function<void(const StoredText& text)>& read);

  enum class Updated { kYes, kUnknown, kTooLarge };

  /// Appends an array of items to a conversation, in time that does not depend on its length. Returns
  /// kUnknown for a response.
  Updated Append(const std::string& id, const std::string& owner, const Json& items);

  /// Applies `change` to a copy of the entry and stores the copy. Calls `change` again when another thread
  /// has changed the entry meanwhile. The entry stays as it is when `change` returns false or the result is
  /// too large.
  Updated Update(const std::string& id, const std::string& owner,
                 const std::function<bool(StoredResponse&)>& change);

  /// Returns true if the entry existed.
  bool Remove(const std::string& id, const std::string& owner);

 private:
  struct Entry {
    std::string owner;
    StoredText text;
    uint64_t version = 0;  // changes with each write
    std::list<std::string>::iterator age;
  };
  // The entries of one owner.
  struct Holding {
    std::list<std::string> ages;  // ids, the least recently used first
    int64_t bytes = 0;
  };
  using Entries = std::unordered_map<std::string, Entry>;

  static Entry EntryOf(const StoredResponse& stored);
  static StoredResponse Parsed(const std::string& id, const Entry& entry);

  // All private methods below need the lock.
  Entries::iterator FindLocked(const std::string& id, const std::string& owner);
  void Touch(Entry& entry);
  void Erase(Entries::iterator entry);
  bool Put(const std::string& id, Entry entry);
  bool MakeRoom(const std::string& id, const std::string& owner, int64_t growth);

  const ResponseStoreOptions options_;
  const int64_t entry_bytes_;
  std::mutex mutex_;  // guards all members below
  Entries entries_;
  std::unordered_map<std::string, Holding> holdings_;  // by owner, none empty
  int64_t bytes_ = 0;
  uint64_t versions_ = 0;
};

}  // namespace moesaic::server
