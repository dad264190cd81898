#include "cache/disk_tier.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

// Tokens of requests that are to be stored: 16 MiB of ids, and more blocks than any cache has.
constexpr size_t kMaxPendingTokens = size_t{4} << 20;
// Rows choose up to a budget of blocks each, and the rows of a prompt's last chunk do not all choose the
// same: fewer blocks than this many budgets are loaded whole.
constexpr int kMinAttachedBudgets = 4;

bool BeginsWith(std::span<const int32_t> tokens, std::span<const int32_t> start) {
  return start.size() <= tokens.size() && std::ranges::equal(start, tokens.first(start.size()));
}

}  // namespace

DiskTier::~DiskTier() {
  for (const auto& [block, record] : attached_) store_->Unpin(record);
}

void DiskTier::OnEnd(uint64_t request, std::string_view name, std::span<const int32_t> tokens) {
  requests_.erase(request);
  if (tokens.empty() || !store_->CanStore(name)) return;
  // The next turn of a session contains all turns before it.
  for (const Pending& other : pending_) {
    if (other.name == name && BeginsWith(other.tokens, tokens)) return;
  }
  std::erase_if(pending_, [&](const Pending& other) {
    if (other.name != name || !BeginsWith(tokens, other.tokens)) return false;
    pending_tokens_ -= other.tokens.size();
    return true;
  });
  pending_.push_back({std::string(name), {tokens.begin(), tokens.end()}});
  pending_tokens_ += tokens.size();
  while (pending_tokens_ > kMaxPendingTokens && pending_.size() > 1) DropFirst();
}

void DiskTier::DropFirst() {
  pending_tokens_ -= pending_.front().tokens.size();
  pending_.pop_front();
}

DiskTier::Storable DiskTier::CountStorable(const Pending& pending, const PrefixMatch& match) const {
  std::optional<int> on_disk;  // computed only where it matters
  Storable storable;
  for (const BlockRef& block : match.blocks) {
    storable.inexact = pool_.inexact(block.index());
    if (storable.inexact) break;  // inexact blocks never reach the disk
    // A partial block that the disk has lost since.
    if (pool_.absent(block.index())) {
      if (!on_disk) on_disk = store_->CountKnown(pending.name, pending.tokens);
      if (storable.blocks >= *on_disk) break;
    }
    ++storable.blocks;
  }
  return storable;
}

void DiskTier::BeginStep(KvOps* ops) {
  for (int64_t left = options_.step_bytes; !pending_.empty() && left > 0;) {
    const Pending& first = pending_.front();
    if (!store_->CanStore(first.name)) {
      DropFirst();
      continue;
    }
    const PrefixMatch match = tree_.Find(first.name, first.tokens);
    const Storable storable = CountStorable(first, match);
    const DiskStore::Reserved reserved =
        store_->Reserve(first.name, tensor::KvTokensOf(first.tokens, storable.blocks), left);
    const auto copied = static_cast<int>(reserved.records.size());
    for (int i = 0; i < copied; ++i) {
      ops->push_back({.kind = KvOpKind::kStore,
                      .block = match.blocks[reserved.blocks - copied + i].index(),
                      .record = reserved.records[i]});
    }
    left -= copied * layout_.total_bytes();
    if (copied > 0) {
      spdlog::debug("KV blocks on disk: storing {} blocks of {} requests that ended", copied,
                    pending_.size());
    }
    const bool all = reserved.blocks == storable.blocks;
    const bool no_room = copied == 0 && !store_->writing();
    if (!all && !no_room) break;  // the others follow when writes that are under way have ended
    const auto wanted = static_cast<int>(first.tokens.size() / kKvBlockTokens);
    if (storable.blocks < wanted && !storable.inexact) {
      lost_ += wanted - std::max(reserved.blocks, store_->Find(first.name, first.tokens));
    }
    DropFirst();
  }
  LogMessages();
}

void DiskTier::LogMessages() {
  for (const std::string& message : store_->TakeMessages()) spdlog::warn("KV blocks on disk: {}", message);
}

void DiskTier::Flush(const std::function<bool()>& stop, const std::function<void(KvOps)>& apply) {
  const auto store_some = [&] {
    KvOps ops;
    BeginStep(&ops);
    apply(std::move(ops));
  };
  store_some();
  while (!pending_.empty() && !(stop && stop())) {
    store_->WaitForWrites(stop);
    store_some();
  }
  if (!pending_.empty()) {
    spdlog::warn("KV blocks on disk: shutdown: dropped pending writes of {} requests", pending_.size());
  }
  const Status status = store_->Flush(stop);
  if (!status.ok()) spdlog::warn("KV blocks on disk: {}", Message(status));
  if (pending_.empty()) LogMessages();
}

void DiskTier::Clear() {
  pending_.clear();
  pending_tokens_ = 0;
  store_->Clear();
}

// Whether only the key summaries of `blocks` are fetched: most of the blocks would never be read, or a part
// of the prefix is attached already.
bool DiskTier::IsAttached(const TierQuery& query, int blocks, int attached_before) const {
  if (!options_.attaches || query.budget_blocks == 0) return false;
  return attached_before > 0 || blocks >= kMinAttachedBudgets * query.budget_blocks;
}

TierHit DiskTier::Lookup(const TierQuery& query) const {
  const auto it = requests_.find(query.request);
  const Request request = it == requests_.end() ? Request{} : it->second;
  if (query.aged || request.tried) return {};
  // Attached blocks that were evicted before the request was admitted are not fetched again.
  if (query.indexed_blocks < request.attached) return {};
  const int blocks = store_->Find(query.name, query.tokens) - query.indexed_blocks;
  if (blocks <= 0) return {};
  TierHit hit = {.blocks = blocks};
  hit.summaries_only = IsAttached(query, blocks, request.attached);
  if (hit.summaries_only) {
    const int64_t most = options_.step_bytes / std::max<int64_t>(1, layout_.summary_bytes * layout_.layers);
    hit.blocks = static_cast<int>(std::clamp<int64_t>(most, 1, blocks));
  }
  hit.tokens = (query.indexed_blocks + hit.blocks) * kKvBlockTokens;
  return hit;
}

bool DiskTier::Fetch(const TierQuery& query, const TierHit& hit, std::span<const BlockRef> blocks,
                     KvOps* ops) {
  const std::span<const BlockRef> to = blocks.last(hit.blocks);
  const auto tokens = tensor::KvTokensOf(query.tokens, blocks.size());
  for (const BlockRef& block : to) MOESAIC_CHECK(block.unique());
  Request& request = requests_[query.request];
  if (!hit.summaries_only) {
    DiskStore::OpenedLoad opened = store_->OpenLoad(query.name, tokens, query.indexed_blocks, hit.blocks);
    for (size_t i = 0; i < to.size(); ++i) {
      ops->push_back({.kind = KvOpKind::kLoad,
                      .block = to[i].index(),
                      .record = opened.records[i],
                      .load = opened.load});
    }
    spdlog::debug("KV blocks on disk: engine request {}: loading {} blocks", query.request, hit.blocks);
    request.load = opened.load;
    loading_[opened.load] = query.request;
    return false;
  }
  const std::vector<uint64_t> records = store_->Pin(query.name, tokens, query.indexed_blocks, hit.blocks);
  store_->CountAttached(hit.blocks);
  spdlog::debug("KV blocks on disk: engine request {}: attached {} blocks, whose layers are read when needed",
                query.request, hit.blocks);
  for (size_t i = 0; i < to.size(); ++i) {
    const int32_t block = to[i].index();
    ops->push_back({.kind = KvOpKind::kAttach, .block = block, .record = records[i]});
    MOESAIC_CHECK(attached_.emplace(block, records[i]).second);
    pool_.SetAbsent(block, true);
  }
  // The last part ends with the last block that is stored.
  const bool more = store_->Find(query.name, query.tokens) > static_cast<int>(blocks.size());
  request.tried = !more;
  request.attached = more ? static_cast<int>(blocks.size()) : 0;
  return true;
}

void DiskTier::OnEvict(const EvictedBlock& evicted, KvOps* ops) {
  if (Release(evicted.block)) ops->push_back({.kind = KvOpKind::kDetach, .block = evicted.block});
}

// Ends the attachment of a block; false: it is not attached.
bool DiskTier::Release(int32_t block) {
  const auto it = attached_.find(block);
  if (it == attached_.end()) return false;
  store_->Unpin(it->second);
  pool_.SetAbsent(block, false);
  attached_.erase(it);
  return true;
}

void DiskTier::Cancel(uint64_t id, KvOps* ops) {
  Request& request = requests_.at(id);
  ops->push_back({.kind = KvOpKind::kCancelLoad, .load = *request.load});
  loading_.erase(*request.load);
  request = {.load = std::nullopt, .tried = true, .attached = 0};
}

std::vector<FinishedFetch> DiskTier::TakeFinished() {
  std::vector<FinishedFetch> finished;
  for (const DiskStore::Loaded& loaded : store_->Poll()) {
    const auto it = loading_.find(loaded.load);
    if (it == loading_.end()) continue;  // cancelled
    requests_[it->second] = {.load = std::nullopt, .tried = true, .attached = 0};
    spdlog::debug("KV blocks on disk: engine request {}: loaded {} blocks", it->second, loaded.blocks);
    finished.push_back({it->second, loaded.blocks});
    loading_.erase(it);
  }
  return finished;
}

void DiskTier::OnResult(const KvResult& result) {
  for (const int32_t block : result.whole_blocks) MOESAIC_CHECK(Release(block));
}

void DiskTier::AddStats(TierStats* stats) const {
  stats->disk = store_->stats();
  stats->disk.lost_blocks = lost_;
}

}  // namespace moesaic::cache
