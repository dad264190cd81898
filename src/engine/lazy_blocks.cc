#include "engine/lazy_blocks.h"

#include <utility>

#include "base/check.h"

namespace moesaic::engine {

LazyBlocks::~LazyBlocks() {
  for (const auto& [index, absent] : absent_) tier_.Return(*absent.disk);
}

void LazyBlocks::Add(int32_t index, cache::DiskBlock& disk) {
  tier_.PutSummaries(disk, pool_.ViewOf(index));
  const bool added = absent_.emplace(index, Absent{&disk, std::vector<bool>(layers_, true), layers_}).second;
  MOESAIC_CHECK(added);
}

void LazyBlocks::Forget(int32_t index) {
  const auto it = absent_.find(index);
  if (it == absent_.end()) return;
  tier_.Return(*it->second.disk);
  absent_.erase(it);
}

void LazyBlocks::Need(const kernels::KvLayer& cache, std::span<const kernels::SequenceSlice> slices) {
  if (absent_.empty() || failed_) return;
  const int64_t layer_bytes = pool_.layout().layer_bytes();
  const int layer = cache.index;
  MOESAIC_CHECK_LT(layer, layers_);
  std::vector<cache::DiskTier::LayerRead> reads;
  std::vector<int32_t> blocks;
  for (const kernels::SequenceSlice& slice : slices) {
    const int count = tensor::KvBlocksFor(slice.start + slice.count);
    for (const int32_t index : std::span(slice.block_table, static_cast<size_t>(count))) {
      const auto it = absent_.find(index);
      if (it == absent_.end() || !it->second.missing[layer]) continue;
      it->second.missing[layer] = false;  // so that it is asked for once
      std::byte* const to = pool_.At(index) + layer * layer_bytes;
      reads.push_back({it->second.disk, layer, to});
      blocks.push_back(index);
    }
  }
  if (reads.empty()) return;
  const int read = tier_.ReadLayers(reads);
  for (size_t i = 0; i < blocks.size(); ++i) {
    Absent& absent = absent_.at(blocks[i]);
    if (static_cast<int>(i) >= read) {
      absent.missing[layer] = true;
    } else if (--absent.left == 0) {
      Forget(blocks[i]);
    }
  }
  if (read < static_cast<int>(reads.size())) failed_ = blocks[read];
}

std::optional<int32_t> LazyBlocks::TakeFailure() { return std::exchange(failed_, std::nullopt); }

}  // namespace moesaic::engine
