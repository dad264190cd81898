#include "engine/cold_blocks.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moesaic::engine {
namespace {

// Of sequences that are to be stored: 16 MiB of ids, and more blocks than any pool has.
constexpr size_t kMostPendingTokens = size_t{4} << 20;

bool BeginsWith(std::span<const int32_t> tokens, std::span<const int32_t> start) {
  return start.size() <= tokens.size() && std::ranges::equal(start, tokens.first(start.size()));
}

}  // namespace

void ColdBlocks::Keep(const Sequence& sequence) {
  const auto tokens =
      std::span(sequence.tokens).first(static_cast<size_t>(sequence.known_blocks) * tensor::kKvBlockTokens);
  const std::string& name = sequence.cache_namespace;
  if (tokens.empty() || !tier_->CanStore(name)) return;
  // A session's next turn holds all of those before it.
  for (const Pending& other : pending_) {
    if (other.name == name && BeginsWith(other.tokens, tokens)) return;
  }
  std::erase_if(pending_, [&](const Pending& other) {
    if (other.name != name || !BeginsWith(tokens, other.tokens)) return false;
    pending_tokens_ -= other.tokens.size();
    return true;
  });
  pending_.push_back({name, {tokens.begin(), tokens.end()}});
  pending_tokens_ += tokens.size();
  while (pending_tokens_ > kMostPendingTokens && pending_.size() > 1) DropFirst();
}

void ColdBlocks::DropFirst() {
  pending_tokens_ -= pending_.front().tokens.size();
  pending_.pop_front();
}

void ColdBlocks::Pump() {
  const int64_t total_bytes = pool_.layout().total_bytes();
  for (int64_t left = step_bytes_; !pending_.empty() && left > 0;) {
    const Pending& first = pending_.front();
    if (!tier_->CanStore(first.name)) {
      DropFirst();
      continue;
    }
    const cache::PrefixMatch match = tree_.Find(first.name, first.tokens);
    std::optional<int> on_disk;  // asked only where it matters
    std::vector<tensor::KvBlockView> blocks;
    blocks.reserve(match.blocks.size());
    bool lossy = false;
    for (const cache::BlockRef& block : match.blocks) {
      lossy = pool_.lossy(block.index());
      if (lossy) break;  // what may not be what computing gives never comes to the disk
      // One of which memory has digests only, and that the disk has lost since.
      if (IsAbsent(block.index())) {
        if (!on_disk) on_disk = tier_->CountKnown(first.name, first.tokens);
        if (static_cast<int>(blocks.size()) >= *on_disk) break;
      }
      blocks.push_back(pool_.ViewOf(block.index()));
    }
    const auto tokens = std::span(first.tokens).first(blocks.size() * tensor::kKvBlockTokens);
    const cache::DiskTier::Stored stored = tier_->Store(first.name, tokens, blocks, left);
    left -= stored.copied * total_bytes;
    const bool all = stored.blocks == static_cast<int>(blocks.size());
    const bool no_room = stored.copied == 0 && !tier_->writing();
    if (!all && !no_room) break;  // the rest when what is on its way has been written
    if (tokens.size() < first.tokens.size() && !lossy) {
      const auto wanted = static_cast<int64_t>(first.tokens.size() / tensor::kKvBlockTokens);
      lost_ += wanted - std::max<int64_t>(stored.blocks, tier_->Find(first.name, first.tokens));
    }
    DropFirst();
  }
  for (const std::string& message : tier_->TakeMessages()) spdlog::warn("KV blocks on disk: {}", message);
}

void ColdBlocks::Flush(const std::function<bool()>& stop) {
  Pump();
  while (!pending_.empty() && !(stop && stop())) {
    tier_->WaitForWrites(stop);
    Pump();
  }
  if (!pending_.empty()) {
    spdlog::warn("KV blocks on disk: those of {} requests are not stored: told to stop", pending_.size());
  }
  const Status status = tier_->Flush(stop);
  if (!status.ok()) spdlog::warn("KV blocks on disk: {}", Message(status));
  if (pending_.empty()) Pump();  // tells what came of the last
}

void ColdBlocks::Clear() {
  pending_.clear();
  pending_tokens_ = 0;
  tier_->Clear();
}

bool ColdBlocks::IsLazy(const Sequence& sequence, int blocks) const {
  // Rows choose up to a budget each, and those of a prompt's last chunk not all the same.
  constexpr int kLeastBudgets = 4;
  const auto& sparsity = sequence.sparsity;
  if (!sparsity || sparsity->cold == nullptr) return false;
  return sequence.lazy_blocks > 0 || blocks >= kLeastBudgets * sparsity->budget_blocks;
}

int ColdBlocks::LazyPart(int blocks) const {
  const tensor::KvLayout& layout = pool_.layout();
  const int64_t most = step_bytes_ / std::max<int64_t>(1, layout.summary_bytes * layout.layers);
  return static_cast<int>(std::clamp<int64_t>(most, 1, blocks));
}

void ColdBlocks::LoadDigests(Sequence& sequence) {
  const auto blocks = std::span(sequence.blocks).subspan(sequence.known_blocks);
  const auto tokens =
      std::span(sequence.tokens).first(sequence.blocks.size() * static_cast<size_t>(tensor::kKvBlockTokens));
  const std::vector<cache::DiskBlock*> borrowed =
      tier_->Borrow(sequence.cache_namespace, tokens, sequence.known_blocks, static_cast<int>(blocks.size()));
  for (size_t i = 0; i < blocks.size(); ++i) {
    MOESAIC_CHECK(blocks[i].unique());
    lazy_.Add(blocks[i].index(), *borrowed[i]);
  }
  sequence.sparsity->audit_every = 0;  // an audit would read all blocks of its layer
  const auto place = [](const cache::BlockRef& block) { return block.index(); };
  std::vector<int32_t> before(sequence.blocks.size());
  std::ranges::transform(sequence.blocks, before.begin(), place);
  tree_.Insert(sequence.cache_namespace, tokens, sequence.blocks, sequence.known_blocks);
  MOESAIC_CHECK(std::ranges::equal(before, sequence.blocks, {}, {}, place));  // the plan found no more of it
}

void ColdBlocks::StartLoad(Sequence& sequence) {
  std::vector<tensor::KvBlockView> to;
  for (const cache::BlockRef& block : std::span(sequence.blocks).subspan(sequence.known_blocks)) {
    MOESAIC_CHECK(block.unique());
    to.push_back(pool_.ViewOf(block.index()));
  }
  sequence.load = tier_->Load(
      sequence.cache_namespace,
      std::span(sequence.tokens).first(sequence.blocks.size() * static_cast<size_t>(tensor::kKvBlockTokens)),
      sequence.known_blocks, to);
}

}  // namespace moesaic::engine
