#include "cache/warm_tier.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

StatusOr<std::unique_ptr<WarmTier>> WarmTier::Create(const KvLayout& layout, int64_t bytes, bool exact,
                                                     runtime::ThreadPool& threads, int64_t step_bytes) {
  const WarmCodec codec(layout, exact);
  const int64_t each = codec.block_bytes() + kNodeBytes;
  const int64_t room = bytes - RootBytes("");
  if (room < each) {
    return ResourceExhausted(
        "the memory for warm KV blocks must be at least {} bytes, one block of {} tokens; found {}",
        each + RootBytes(""), kKvBlockTokens, bytes);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SwapSpace> space,
                   SwapSpace::Create(codec.block_bytes(), room / each * codec.block_bytes()));
  const auto step = std::clamp<int64_t>(step_bytes / layout.total_bytes(), 1, std::numeric_limits<int>::max());
  return std::unique_ptr<WarmTier>(
      new WarmTier(codec, std::move(space), threads, bytes, static_cast<int>(step)));
}

WarmTier::WarmTier(const WarmCodec& codec, std::unique_ptr<SwapSpace> space, runtime::ThreadPool& threads,
                   int64_t bytes, int step_blocks)
    : codec_(codec),
      space_(std::move(space)),
      threads_(threads),
      bytes_(bytes),
      step_blocks_(step_blocks),
      left_(step_blocks) {
  stats_.capacity_blocks = space_->total_blocks();
}

// The name stands in the root and in the map.
int64_t WarmTier::RootBytes(std::string_view name) {
  return kNodeBytes + 2 * static_cast<int64_t>(name.size());
}

int64_t WarmTier::UsedBytes() const {
  return std::ssize(by_use_) * codec_.block_bytes() + index_.blocks() * kNodeBytes + root_bytes_;
}

WarmTier::~WarmTier() = default;

std::vector<SwapRef> WarmTier::Find(std::string_view name, std::span<const int32_t> tokens, int first,
                                    int most) const {
  std::vector<SwapRef> found;
  int count = 0;
  bool whole = true;
  const size_t wanted = std::min(tokens.size() / kKvBlockTokens, static_cast<size_t>(first) + most);
  index_.Walk(name, tokens.first(wanted * kKvBlockTokens), [&](int32_t id) {
    const SwapRef& slot = index_.payload(id).slot;
    if (count++ < first) return;
    whole = whole && slot != nullptr;
    if (whole) found.push_back(slot);
  });
  return found;
}

void WarmTier::Touch(std::string_view name, std::span<const int32_t> tokens, int count) {
  std::vector<int32_t> chain;
  index_.Walk(name, tokens.first(static_cast<size_t>(count) * kKvBlockTokens),
              [&](int32_t id) { chain.push_back(id); });
  for (; !chain.empty(); chain.pop_back()) {
    const Entry& entry = index_.payload(chain.back());
    if (entry.slot != nullptr) by_use_.splice(by_use_.end(), by_use_, entry.place);
  }
}

// Finds the longest known beginning of `chain`.
void WarmTier::Locate(std::string_view name, Chain chain, bool before_last) {
  if (before_last) {
    if (reached_depth_ <= chain.size()) return;
    reached_ = index_.Parent(reached_);
    --reached_depth_;
    MOESAIC_CHECK_EQ(reached_depth_, chain.size());
    return;
  }
  reached_ = -1;
  reached_depth_ = 0;
  Index::Position at = {.node = index_.FindRoot(name)};
  for (; at.node != nullptr && reached_depth_ < chain.size(); ++reached_depth_) {
    at = index_.Next(at, chain[reached_depth_]);
    if (!at) return;
    reached_ = index_.IdAt(at);
  }
}

// Adds the blocks of `chain`, which was located, that are missing; the last block.
int32_t WarmTier::Reach(std::string_view name, Chain chain) {
  if (index_.FindRoot(name) == nullptr) root_bytes_ += RootBytes(name);
  Index::Position at =
      reached_ < 0 ? Index::Position{.node = &index_.AddRoot(name)} : index_.position(reached_);
  for (; reached_depth_ < chain.size(); ++reached_depth_) {
    reached_ = index_.NewId();
    at = index_.Append(at, reached_, chain[reached_depth_], {}, /*extend=*/true);
  }
  return reached_;
}

bool WarmTier::IsFinite(const KvBlockView& block) {
  if (codec_.exact()) return true;
  std::atomic<bool> finite = true;
  threads_.Run(codec_.layers(), [&](int64_t layer, int) {
    if (!codec_.IsFinite(block, static_cast<int>(layer))) finite = false;
  });
  return finite;
}

// Takes a slot for the end of `chain`, which was located. Null: somebody is about to read every block, or the
// names of the chain do not fit.
SwapRef WarmTier::TakeSlot(std::string_view name, Chain chain) {
  if (codec_.block_bytes() + std::ssize(chain) * kNodeBytes + RootBytes(name) > bytes_) return nullptr;
  for (auto it = by_use_.begin();;) {
    const int64_t missing = static_cast<int64_t>(chain.size() - reached_depth_) * kNodeBytes +
                            (index_.FindRoot(name) == nullptr ? RootBytes(name) : 0);
    if (UsedBytes() + codec_.block_bytes() + missing <= bytes_) {
      if (SwapRef slot = space_->Take()) return slot;
    }
    while (it != by_use_.end() && index_.payload(*it).slot.use_count() > 1) ++it;
    if (it == by_use_.end()) return nullptr;
    Drop(*it++);
    ++stats_.evicted_blocks;
  }
}

void WarmTier::Drop(int32_t id) {
  Entry& entry = index_.payload(id);
  by_use_.erase(entry.place);
  entry.slot = nullptr;
  Prune(id);
}

// Removes `id` and blocks before it as long as they have no slot and no block follows them.
void WarmTier::Prune(int32_t id) {
  while (id >= 0 && index_.payload(id).slot == nullptr && index_.Follower(id) < 0) {
    const int32_t parent = index_.Parent(id);
    if (reached_ == id) {
      reached_ = parent;
      --reached_depth_;
    }
    const std::string name(parent < 0 ? index_.NameOf(id) : "");
    index_.Remove(id);
    if (parent < 0 && index_.FindRoot(name) == nullptr) root_bytes_ -= RootBytes(name);
    id = parent;
  }
}

void WarmTier::Put(std::string_view name, Chain chain, const KvBlockView& block, WarmInRow row) {
  const Clock::time_point start = Clock::now();
  Locate(name, chain, row.before_last);
  if (reached_depth_ == chain.size() && index_.payload(reached_).slot != nullptr) {
    by_use_.splice(by_use_.end(), by_use_, index_.payload(reached_).place);
    return;
  }
  if (left_ <= row.more) {
    ++stats_.dropped_blocks;
    return;
  }
  --left_;
  // Nothing goes for a block that is not kept, and with what goes, nodes go.
  SwapRef slot = IsFinite(block) ? TakeSlot(name, chain) : nullptr;
  if (slot == nullptr) {
    ++stats_.refused_blocks;
    return;
  }
  threads_.Run(codec_.layers(),
               [&](int64_t layer, int) { codec_.Encode(block, static_cast<int>(layer), space_->At(*slot)); });
  const int32_t id = Reach(name, chain);
  index_.payload(id) = {.slot = std::move(slot), .place = by_use_.insert(by_use_.end(), id)};
  ++stats_.stored_blocks;
  stats_.store_seconds += SecondsSince(start);
}

void WarmTier::Restore(std::span<const SwapRef> blocks, std::span<const KvBlockView> to) {
  const Clock::time_point start = Clock::now();
  MOESAIC_CHECK_EQ(blocks.size(), to.size());
  const int64_t layers = codec_.layers();
  threads_.Run(std::ssize(blocks) * layers, [&](int64_t task, int) {
    const size_t i = task / layers;
    codec_.Decode(space_->At(*blocks[i]), static_cast<int>(task % layers), to[i]);
  });
  stats_.restored_blocks += std::ssize(blocks);
  stats_.restore_seconds += SecondsSince(start);
}

void WarmTier::Clear() {
  by_use_.clear();
  index_.Clear();
  root_bytes_ = 0;
  reached_ = -1;
  reached_depth_ = 0;
}

WarmTierStats WarmTier::stats() const {
  WarmTierStats stats = stats_;
  stats.blocks = static_cast<int>(by_use_.size());
  stats.bytes = stats.blocks * codec_.block_bytes();
  return stats;
}

void WarmTier::CheckStructure() const {
  index_.CheckStructure();
  int64_t root_bytes = 0;
  for (const auto& [name, root] : index_.roots()) root_bytes += RootBytes(name);
  MOESAIC_CHECK_EQ(root_bytes, root_bytes_);
  for (auto it = by_use_.begin(); it != by_use_.end(); ++it) {
    MOESAIC_CHECK(index_.contains(*it) && index_.payload(*it).slot != nullptr);
    MOESAIC_CHECK(index_.payload(*it).place == it);
  }
  MOESAIC_CHECK_LE(static_cast<int>(by_use_.size()), stats_.capacity_blocks);
  MOESAIC_CHECK_LE(UsedBytes(), bytes_);
  MOESAIC_CHECK(reached_ < 0 ? reached_depth_ == 0 : index_.contains(reached_));
}

}  // namespace moesaic::cache
