#include "engine/parked_blocks.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::engine {

bool ParkedBlocks::IsWorthIt(const Sequence& sequence) const {
  const auto tokens = static_cast<double>(sequence.computed);
  const double compute = tokens * (1 + tokens / (2 * static_cast<double>(attention_tokens_)));
  return compute > copy_tokens_ * tensor::KvBlocksFor(sequence.computed);
}

void ParkedBlocks::Park(Sequence& sequence) {
  MOESAIC_CHECK(sequence.parked.empty());
  if (swap_ == nullptr || !IsWorthIt(sequence)) return;
  const int blocks = tensor::KvBlocksFor(sequence.computed);
  sequence.parked.resize(blocks);
  sequence.parked_tokens = sequence.computed;
  for (int i = 0; i < blocks; ++i) {
    const int32_t block = sequence.blocks[i].index();
    ParkedBlock& parked = sequence.parked[i];
    if (pool_.cached(block)) {
      parked.in_tree = block;
      wanted_[block].emplace_back(&sequence, i);
    } else {
      parked.swapped = swap_->Put(pool_, block);
    }
  }
}

void ParkedBlocks::Leaves(int32_t block) {
  const auto it = wanted_.find(block);
  if (it == wanted_.end()) return;
  const cache::SwapRef swapped = swap_->Put(pool_, block);  // null when it is full: then it is computed again
  for (const auto& [sequence, i] : it->second) sequence->parked[i] = {.in_tree = -1, .swapped = swapped};
  wanted_.erase(it);
}

int ParkedBlocks::Tokens(const Sequence& sequence, int known) {
  const auto& parked = sequence.parked;
  const auto begin = parked.begin() + std::min<int64_t>(known, static_cast<int64_t>(parked.size()));
  const auto end =
      std::find_if(begin, parked.end(), [](const ParkedBlock& block) { return block.swapped == nullptr; });
  if (begin == end) return 0;
  return std::min(sequence.parked_tokens, static_cast<int>(end - parked.begin()) * tensor::kKvBlockTokens);
}

void ParkedBlocks::Restore(Sequence& sequence, int known, int tokens) {
  for (int i = known; i < tensor::KvBlocksFor(tokens); ++i) {
    const cache::BlockRef& to = sequence.blocks[i];
    MOESAIC_CHECK(to.unique());
    swap_->Get(*sequence.parked[i].swapped, pool_, to.index());
  }
}

void ParkedBlocks::Forget(Sequence& sequence) {
  for (const ParkedBlock& parked : sequence.parked) {
    if (parked.in_tree < 0) continue;
    const auto it = wanted_.find(parked.in_tree);
    std::erase_if(it->second, [&](const auto& want) { return want.first == &sequence; });
    if (it->second.empty()) wanted_.erase(it);
  }
  sequence.parked.clear();
  sequence.parked_tokens = 0;
}

}  // namespace moesaic::engine
