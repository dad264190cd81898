// What becomes of the blocks of sequences that were preempted: those in the tree are watched and copied out
// when the tree lets them go, the others are copied out at once, and all are copied back at re-admission.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "cache/kv_pool.h"
#include "cache/swap_space.h"
#include "engine/sequence.h"

namespace moesaic::engine {

/// Engine thread only.
class ParkedBlocks {
 public:
  /// Both are borrowed and must outlive this. `swap` may be null: then nothing is kept.
  ParkedBlocks(const cache::KvPool& pool, cache::SwapSpace* swap) : pool_(pool), swap_(swap) {}

  bool keeps() const { return swap_ != nullptr; }

  /// Says what copying a block out and in costs, in tokens computed at the start of a sequence, and at which
  /// position attention doubles a token's cost.
  void SetCosts(double copy_tokens, int64_t attention_tokens) {
    copy_tokens_ = copy_tokens;
    attention_tokens_ = attention_tokens;
  }

  /// A sequence is about to lose its blocks. Does nothing where computing them again is cheaper.
  void Park(Sequence& sequence);
  /// The tree is about to let a block go.
  void Leaves(int32_t block);
  /// Tokens of `sequence` that stand in its first `known` blocks, which the tree has, and in the swap space
  /// behind them; 0 when the space has nothing behind them.
  static int Tokens(const Sequence& sequence, int known);
  /// Copies back the first `tokens` that Tokens counted, as far as they stand behind the first `known`
  /// blocks, into blocks[known ..] of the sequence, which nobody else may hold.
  void Restore(Sequence& sequence, int known, int tokens);
  /// Gives up what is kept for a sequence.
  void Forget(Sequence& sequence);

 private:
  bool IsWorthIt(const Sequence& sequence) const;

  const cache::KvPool& pool_;
  cache::SwapSpace* const swap_;
  double copy_tokens_ = 0;
  int64_t attention_tokens_ = 1;
  // Who wants a block of the tree back, and as which of its blocks.
  absl::flat_hash_map<int32_t, std::vector<std::pair<Sequence*, int>>> wanted_;
};

}  // namespace moesaic::engine
