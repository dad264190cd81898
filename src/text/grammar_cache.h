// LRU cache of compiled grammars by source.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/status.h"
#include "text/grammar.h"

namespace moesaic::text {

/// Stores failures too, so that an expensive grammar that is rejected costs its time only once. Use by one
/// thread at a time.
class GrammarCache {
 public:
  using Value = std::shared_ptr<const StatusOr<Grammar>>;

  explicit GrammarCache(size_t max_bytes) : max_bytes_(max_bytes) {}

  /// Returns null if `key` is not cached.
  Value Find(const std::string& key);
  /// Evicts other entries to stay within the limit. A value larger than a quarter of the limit is not stored.
  void Insert(const std::string& key, Value value);

  int size() const { return static_cast<int>(entries_.size()); }
  size_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::string key;
    Value value;
    size_t bytes;
  };
  const size_t max_bytes_;
  size_t bytes_ = 0;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
};

}  // namespace moesaic::text
