// The plain way to cache prefixes, for comparison: a table from the chained hash of a block to the block, and
// a list in the order of use. Equality is decided by the hash alone.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <list>
#include <span>

#include "prefix/keyed_hash.h"
#include "tensor/kv_layout.h"

namespace moesaic::bench {

class HashChain {
 public:
  /// Blocks of `tokens` that are here, from the first on; they become the last used.
  int Match(std::span<const int32_t> tokens) {
    return Walk(tokens, [this](uint64_t hash) {
      const auto it = blocks_.find(hash);
      if (it == blocks_.end()) return false;
      order_.splice(order_.end(), order_, it->second);
      return true;
    });
  }

  void Insert(std::span<const int32_t> tokens) {
    Walk(tokens, [this](uint64_t hash) {
      const auto [it, fresh] = blocks_.try_emplace(hash);
      if (fresh) it->second = order_.insert(order_.end(), hash);
      return true;
    });
  }

  void Evict(int count) {
    for (; count > 0 && !order_.empty(); --count) {
      blocks_.erase(order_.front());
      order_.pop_front();
    }
  }

 private:
  template <typename Visit>
  int Walk(std::span<const int32_t> tokens, const Visit& visit) {
    uint64_t hash = hasher_.Root("");
    int blocks = 0;
    for (; tokens.size() >= tensor::kKvBlockTokens;
         tokens = tokens.subspan(tensor::kKvBlockTokens), ++blocks) {
      hash = hasher_.Next(hash, tokens.first(tensor::kKvBlockTokens));
      if (!visit(hash)) break;
    }
    return blocks;
  }

  prefix::KeyedHasher hasher_;
  std::list<uint64_t> order_;
  absl::flat_hash_map<uint64_t, std::list<uint64_t>::iterator> blocks_;
};

}  // namespace moesaic::bench
