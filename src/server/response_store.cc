#include "server/response_store.h"

#include <utility>

namespace moesaic::server {

void ResponseStore::Add(StoredResponse stored) {
  if (!keeps()) return;
  const auto bytes = static_cast<int64_t>(Dump(stored.response).size() + Dump(stored.messages).size());
  const std::lock_guard lock(mutex_);
  const std::string id = stored.id;
  entries_[id] = {std::make_shared<const StoredResponse>(std::move(stored)), bytes,
                  ages_.insert(ages_.end(), id)};
  bytes_ += bytes;
  while (!ages_.empty() && (std::cmp_greater(entries_.size(), options_.most) || bytes_ > options_.bytes)) {
    Erase(entries_.find(ages_.front()));
  }
}

std::shared_ptr<const StoredResponse> ResponseStore::Find(const std::string& id,
                                                          const std::string& owner) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.stored->owner != owner) return nullptr;
  return found->second.stored;
}

bool ResponseStore::Remove(const std::string& id, const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.stored->owner != owner) return false;
  Erase(found);
  return true;
}

void ResponseStore::Erase(Entries::iterator entry) {
  bytes_ -= entry->second.bytes;
  ages_.erase(entry->second.age);
  entries_.erase(entry);
}

}  // namespace moesaic::server
