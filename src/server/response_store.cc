#include "server/response_store.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace moesaic::server {

ResponseStore::Entry ResponseStore::EntryOf(const StoredResponse& stored) {
  Entry entry;
  entry.owner = stored.owner;
  entry.text = {.response = Dump(stored.response),
                .messages = StoredItems(stored.messages),
                .input = StoredItems(stored.input),
                .is_conversation = stored.is_conversation};
  return entry;
}

StoredResponse ResponseStore::Parsed(const std::string& id, const Entry& entry) {
  return {.id = id,
          .owner = entry.owner,
          .response = ParseDumped(entry.text.response),
          .messages = ParseDumped(entry.text.messages.json()),
          .input = ParseDumped(entry.text.input.json()),
          .is_conversation = entry.text.is_conversation};
}

bool ResponseStore::Add(StoredResponse stored) {
  if (!keeps()) return false;
  Entry entry = EntryOf(stored);
  const std::lock_guard lock(mutex_);
  return Put(stored.id, std::move(entry));
}

std::optional<StoredResponse> ResponseStore::Find(const std::string& id, const std::string& owner) {
  Entry copy;
  {
    const std::lock_guard lock(mutex_);
    const auto found = FindLocked(id, owner);
    if (found == entries_.end()) return std::nullopt;
    Touch(found->second);
    copy = found->second;
  }
  return Parsed(id, copy);
}

void ResponseStore::Read(const std::string& id, const std::string& owner,
                         const std::function<void(const StoredText& text)>& read) {
  const std::lock_guard lock(mutex_);
  const auto found = FindLocked(id, owner);
  if (found == entries_.end()) return;
  Touch(found->second);
  read(found->second.text);
}

ResponseStore::Updated ResponseStore::Append(const std::string& id, const std::string& owner,
                                             const Json& items) {
  const StoredItems more(items);
  const std::lock_guard lock(mutex_);
  const auto found = FindLocked(id, owner);
  if (found == entries_.end() || !found->second.text.is_conversation) return Updated::kUnknown;
  Entry& entry = found->second;
  Touch(entry);
  if (items.empty()) return Updated::kYes;
  const auto growth = static_cast<int64_t>(entry.text.messages.GrowthBy(more));
  if (entry.text.bytes() + growth > entry_bytes_ || !MakeRoom(id, owner, growth)) return Updated::kTooLarge;
  entry.text.messages.Append(more);
  bytes_ += growth;
  holdings_[owner].bytes += growth;
  entry.version = ++versions_;
  return Updated::kYes;
}

ResponseStore::Updated ResponseStore::Update(const std::string& id, const std::string& owner,
                                             const std::function<bool(StoredResponse&)>& change) {
  for (;;) {
    Entry copy;
    {
      const std::lock_guard lock(mutex_);
      const auto found = FindLocked(id, owner);
      if (found == entries_.end()) return Updated::kUnknown;
      copy = found->second;
    }
    StoredResponse stored = Parsed(id, copy);
    if (!change(stored)) return Updated::kYes;
    Entry changed = EntryOf(stored);
    const std::lock_guard lock(mutex_);
    const auto found = FindLocked(id, owner);
    if (found == entries_.end()) return Updated::kUnknown;
    if (found->second.version != copy.version) continue;
    return Put(id, std::move(changed)) ? Updated::kYes : Updated::kTooLarge;
  }
}

bool ResponseStore::Remove(const std::string& id, const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const auto found = FindLocked(id, owner);
  if (found == entries_.end()) return false;
  Erase(found);
  return true;
}

ResponseStore::Entries::iterator ResponseStore::FindLocked(const std::string& id, const std::string& owner) {
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second.owner == owner ? found : entries_.end();
}

void ResponseStore::Touch(Entry& entry) {
  std::list<std::string>& ages = holdings_[entry.owner].ages;
  ages.splice(ages.end(), ages, entry.age);
}

// Stores `entry` in place of an entry with the same id and owner, as the most recently used one.
bool ResponseStore::Put(const std::string& id, Entry entry) {
  const auto known = entries_.find(id);
  const int64_t bytes = entry.text.bytes();
  const int64_t growth = bytes - (known == entries_.end() ? 0 : known->second.text.bytes());
  if (bytes > entry_bytes_ || !MakeRoom(id, entry.owner, growth)) return false;
  if (known != entries_.end()) Erase(known);
  Holding& holding = holdings_[entry.owner];
  entry.age = holding.ages.insert(holding.ages.end(), id);
  entry.version = ++versions_;
  holding.bytes += bytes;
  bytes_ += bytes;
  entries_.emplace(id, std::move(entry));
  return true;
}

// Evicts entries so that the entry `id` of `owner` can grow by `growth` bytes. Evicts nothing and returns
// false when the owner that would then hold most is `owner` with this entry alone.
bool ResponseStore::MakeRoom(const std::string& id, const std::string& owner, int64_t growth) {
  struct Share {
    std::list<std::string>::const_iterator next, end;  // ids that are not chosen yet
    int64_t bytes;
    int64_t entries;
  };
  const int64_t added = entries_.contains(id) ? 0 : 1;
  int64_t bytes = bytes_ + growth;
  int64_t count = static_cast<int64_t>(entries_.size()) + added;
  if (bytes <= options_.bytes && count <= options_.most) return true;

  // The first of equal shares is chosen, so `owner` comes first.
  std::vector<Share> shares = {{{}, {}, growth, added}};
  for (const auto& [name, holding] : holdings_) {
    Share share{holding.ages.begin(), holding.ages.end(), holding.bytes,
                static_cast<int64_t>(holding.ages.size())};
    if (name != owner) {
      shares.push_back(share);
      continue;
    }
    shares[0] = share;
    shares[0].bytes += growth;
    shares[0].entries += added;
  }
  std::vector<Entries::iterator> evicted;
  while (bytes > options_.bytes || count > options_.most) {
    const bool by_bytes = bytes > options_.bytes;
    Share& largest = *std::ranges::max_element(
        shares, {}, [by_bytes](const Share& share) { return by_bytes ? share.bytes : share.entries; });
    if (largest.next != largest.end && *largest.next == id) ++largest.next;
    if (largest.next == largest.end) return false;
    const auto entry = entries_.find(*largest.next++);
    evicted.push_back(entry);
    largest.bytes -= entry->second.text.bytes();
    bytes -= entry->second.text.bytes();
    --largest.entries;
    --count;
  }
  for (const auto entry : evicted) Erase(entry);
  spdlog::debug("stored responses: evicted {}, {} with {} bytes remain", evicted.size(), entries_.size(),
                bytes_);
  return true;
}

void ResponseStore::Erase(Entries::iterator entry) {
  const auto holding = holdings_.find(entry->second.owner);
  const int64_t bytes = entry->second.text.bytes();
  bytes_ -= bytes;
  holding->second.bytes -= bytes;
  holding->second.ages.erase(entry->second.age);
  if (holding->second.ages.empty()) holdings_.erase(holding);
  entries_.erase(entry);
}

}  // namespace moesaic::server
