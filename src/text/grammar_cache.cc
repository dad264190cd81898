#include "text/grammar_cache.h"

#include <utility>

namespace moesaic::text {

GrammarCache::Value GrammarCache::Find(const std::string& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->value;
}

void GrammarCache::Insert(const std::string& key, Value value) {
  constexpr size_t kOverhead = 512;  // list and map nodes, and the message of a failure
  const size_t bytes = kOverhead + 2 * key.size() + (value->ok() ? (*value)->bytes() : 0);
  if (bytes > max_bytes_ / 4 || by_key_.contains(key)) return;
  while (bytes_ + bytes > max_bytes_) {
    bytes_ -= entries_.back().bytes;
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  entries_.push_front({key, std::move(value), bytes});
  by_key_[key] = entries_.begin();
  bytes_ += bytes;
}

}  // namespace moesaic::text
