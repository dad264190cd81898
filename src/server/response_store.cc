#include "server/response_store.h"

#include <utility>

namespace moesaic::server {

bool ResponseStore::Add(StoredResponse stored) {
  if (!keeps()) return false;
  Entry entry{.owner = std::move(stored.owner),
              .response = Dump(stored.response),
              .messages = Dump(stored.messages),
              .age = {}};
  const std::lock_guard lock(mutex_);
  return AddLocked(stored.id, std::move(entry));
}

ResponseStore::Updated ResponseStore::Update(const std::string& id, const std::string& owner,
                                             const std::function<bool(StoredResponse&)>& change) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.owner != owner) return Updated::kUnknown;
  StoredResponse stored{id, owner, ParseDumped(found->second.response), ParseDumped(found->second.messages)};
  if (!change(stored)) return Updated::kYes;
  Entry entry{
      .owner = owner, .response = Dump(stored.response), .messages = Dump(stored.messages), .age = {}};
  return AddLocked(id, std::move(entry)) ? Updated::kYes : Updated::kTooLarge;
}

bool ResponseStore::AddLocked(const std::string& id, Entry entry) {
  const int64_t bytes = BytesOf(entry);
  if (bytes > options_.bytes) return false;
  if (const auto known = entries_.find(id); known != entries_.end()) Erase(known);
  entry.age = ages_.insert(ages_.end(), id);
  entries_.emplace(id, std::move(entry));
  bytes_ += bytes;
  while (!ages_.empty() && (std::cmp_greater(entries_.size(), options_.most) || bytes_ > options_.bytes)) {
    Erase(entries_.find(ages_.front()));
  }
  return true;
}

std::optional<StoredResponse> ResponseStore::Find(const std::string& id, const std::string& owner) const {
  std::string response, messages;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end() || found->second.owner != owner) return std::nullopt;
    response = found->second.response;
    messages = found->second.messages;
  }
  return StoredResponse{id, owner, ParseDumped(response), ParseDumped(messages)};
}

bool ResponseStore::Remove(const std::string& id, const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.owner != owner) return false;
  Erase(found);
  return true;
}

void ResponseStore::Erase(Entries::iterator entry) {
  bytes_ -= BytesOf(entry->second);
  ages_.erase(entry->second.age);
  entries_.erase(entry);
}

}  // namespace moesaic::server
