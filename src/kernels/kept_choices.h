// Recent choices of blocks, for later rows of the sequence that read the same blocks:
// docs/contracts/sparsity.md, C5.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moesaic::kernels {

/// The latest choices of one sequence in each layer and KV head, by the position of the row that made them.
/// Blocks are identified by their position in the sequence, because their numbers change when a preempted
/// sequence resumes. One thread.
class KeptChoices {
 public:
  /// `most`: maximum choices that are stored per layer and KV head. The oldest one is evicted first.
  KeptChoices(int layers, int heads, int most);

  /// Returns the blocks, in ascending order, that the row at `position` chose. Empty: they are not stored.
  std::span<const int32_t> Find(int layer, int head, int position) const;
  /// Stores a copy, which replaces an earlier choice of the row at `position`.
  void Put(int layer, int head, int position, std::span<const int32_t> places);

 private:
  struct Choice {
    int position = -1;
    std::vector<int32_t> places;
  };
  struct Ring {
    std::vector<Choice> choices;  // [most]
    size_t next = 0;              // evicted first
  };
  int heads_;
  std::vector<Ring> rings_;  // [layers][heads]
};

}  // namespace moesaic::kernels
