// Compiled grammars by their source, least recently used first out.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/status.h"
#include "text/grammar.h"

namespace moesaic::text {

/// Holds refusals as well, so that a grammar that costs much before it is refused does so once. One thread at
/// a time.
class GrammarCache {
 public:
  using Value = std::shared_ptr<const StatusOr<Grammar>>;

  explicit GrammarCache(size_t max_bytes) : max_bytes_(max_bytes) {}

  /// Null if there is none.
  Value Find(const std::string& key);
  /// Evicts others to stay within the limit. A value larger than a quarter of it is not stored.
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
  std::list<Entry> entries_;  // the most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
};

}  // namespace moesaic::text
