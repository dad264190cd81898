// What rows of one sequence chose of late, for the rows behind them that read the same blocks:
// docs/contracts/sparsity.md, C6.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moesaic::kernels {

/// Of each layer and KV head the latest choices, by the position of the row that made them. Blocks are named
/// by their place in the sequence, not by number: a sequence that was preempted comes back in others. One
/// thread.
class KeptChoices {
 public:
  /// `most`: choices of a layer and KV head that are kept; the first that came goes first.
  KeptChoices(int layers, int heads, int most);

  /// The places of the blocks that the row at `position` chose, ascending; empty: that is not kept.
  std::span<const int32_t> Find(int layer, int head, int position) const;
  /// Keeps a copy in the place of what the row at `position` chose before, if that is here.
  void Put(int layer, int head, int position, std::span<const int32_t> places);

 private:
  struct Choice {
    int position = -1;
    std::vector<int32_t> places;
  };
  struct Ring {
    std::vector<Choice> choices;  // [most]
    size_t next = 0;              // goes first
  };
  int heads_;
  std::vector<Ring> rings_;  // [layers][heads]
};

}  // namespace moesaic::kernels
