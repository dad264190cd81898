#include "server/response_store.h"

#include <utility>

namespace moesaic::server {

void ResponseStore::Add(StoredResponse stored) {
  if (!keeps()) return;
  Entry entry{.owner = std::move(stored.owner),
              .response = Dump(stored.response),
              .messages = Dump(stored.messages),
              .age = {}};
  const int64_t bytes = BytesOf(entry);
  if (bytes > options_.bytes) return;
  const std::lock_guard lock(mutex_);
  if (const auto known = entries_.find(stored.id); known != entries_.end()) Erase(known);
  entry.age = ages_.insert(ages_.end(), stored.id);
  entries_.emplace(stored.id, std::move(entry));
  bytes_ += bytes;
  while (!ages_.empty() && (std::cmp_greater(entries_.size(), options_.most) || bytes_ > options_.bytes)) {
    Erase(entries_.find(ages_.front()));
  }
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
  return StoredResponse{id, owner, Json::parse(response), Json::parse(messages)};
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
