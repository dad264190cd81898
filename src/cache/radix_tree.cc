#include "cache/radix_tree.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

// Children that are looked through for a partial block: enough for the turns that agents branch into, few
// enough that a system prompt with thousands of users costs nothing.
constexpr int kTailCandidates = 16;
// Blocks whose tokens are fetched ahead of the comparison: one takes about 10 ns, memory about 100.
constexpr size_t kAhead = 8;

bool Equal(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::memcmp(a.data(), b.data(), kKvBlockTokens * sizeof(int32_t)) == 0;
}

// Some of a block's tokens, from all over it: enough to tell most blocks apart.
uint64_t TagOf(std::span<const int32_t> tokens) {
  const auto at = [&](int i) { return static_cast<uint64_t>(static_cast<uint32_t>(tokens[i])); };
  return (at(0) << 32 | at(21)) ^ (at(42) << 16 | at(63) << 40);
}

void Prefetch(const int32_t* tokens) {
  constexpr int kTokensPerLine = 16;
  for (int i = 0; i < kKvBlockTokens; i += kTokensPerLine) __builtin_prefetch(tokens + i);
}

}  // namespace

struct RadixTree::Run : EvictionQueue::Entry {
  Run* parent = nullptr;                                             // null: the root of a namespace
  Run *first_child = nullptr, *next = nullptr, *previous = nullptr;  // siblings, the newest first
  Run* likely = nullptr;                                             // the child that was used last
  uint64_t likely_tag = 0;                                           // its tag
  uint64_t tag = 0;                                                  // TagOf its first block
  std::unique_ptr<Run> twin;                                         // another one of the same hash
  std::vector<int32_t> blocks;                                       // empty in roots only
  int64_t start = 0;                                                 // blocks before it
  uint64_t root_hash = 0;                                            // roots only
  std::string name;                                                  // roots only
  uint64_t last_use = 0;
  uint32_t uses = 1;       // sequences that went on from here each in its own way, or came back after it went
  bool continued = false;  // something stood behind it once
  Session session = Session::kNone;
  double returns_at = 0;
  bool open = false;  // only its maker has used it and may make it longer

  int64_t end() const { return start + static_cast<int64_t>(blocks.size()); }
};

RadixTree::RadixTree(KvPool& pool, std::unique_ptr<EvictionPolicy> policy, KvObserver* observer,
                     const BlockHasher& hasher)
    : pool_(pool),
      policy_(std::move(policy)),
      observer_(observer),
      hasher_(hasher),
      tokens_(static_cast<size_t>(pool.total_blocks()) * kKvBlockTokens),
      hashes_(pool.total_blocks()),
      held_(pool.total_blocks()),
      places_(pool.total_blocks()) {}

RadixTree::~RadixTree() {
  for (const BlockRef& block : held_) {
    if (block) pool_.SetCached(block, false);
  }
}

std::span<const int32_t> RadixTree::TokensOf(int32_t block) const { return KvBlockAt(tokens_, block); }

uint64_t RadixTree::EndHash(const Run& run) const {
  return run.parent == nullptr ? run.root_hash : hashes_[run.blocks.back()];
}

RadixTree::Run* RadixTree::RootOf(std::string_view name) const {
  const auto it = roots_.find(name);
  return it == roots_.end() ? nullptr : it->second.get();
}

RadixTree::Run& RadixTree::MakeRoot(std::string_view name) {
  std::unique_ptr<Run>& root = roots_[std::string(name)];
  if (root == nullptr) {
    root = std::make_unique<Run>();
    root->name = name;
    root->root_hash = hasher_.Root(name);
  }
  return *root;
}

RadixTree::Run* RadixTree::FindChild(const Run& parent, std::span<const int32_t> tokens) const {
  if (parent.first_child == nullptr) return nullptr;
  // Comparing with the child that was used last takes less than hashing, which only then tells where to look.
  const Run* likely = parent.likely;
  if (likely != nullptr && parent.likely_tag == TagOf(tokens) &&
      Equal(TokensOf(likely->blocks.front()), tokens)) {
    return parent.likely;
  }
  const auto it = by_hash_.find(hasher_.Next(EndHash(parent), tokens));
  if (it == by_hash_.end()) return nullptr;
  for (Run* run = it->second.get(); run != nullptr; run = run->twin.get()) {
    if (run->parent == &parent && Equal(TokensOf(run->blocks.front()), tokens)) return run;
  }
  return nullptr;
}

PrefixMatch RadixTree::Find(std::string_view name, std::span<const int32_t> tokens) const {
  PrefixMatch match;
  const Run* run = RootOf(name);
  if (run == nullptr) return match;
  const size_t whole = tokens.size() / kKvBlockTokens;
  size_t offset = 0;  // in `run`
  while (match.blocks.size() < whole) {
    const size_t done = match.blocks.size();
    const Run* child = FindChild(*run, KvBlockAt(tokens, done));
    if (child == nullptr) break;
    run = child;
    const size_t most = std::min(run->blocks.size(), whole - done);
    match.blocks.reserve(whole);  // once: nothing moves
    for (offset = 0; offset < most; ++offset) {
      if (offset + kAhead < most) Prefetch(&tokens_[run->blocks[offset + kAhead] * int64_t{kKvBlockTokens}]);
      const int32_t block = run->blocks[offset];
      if (!Equal(TokensOf(block), KvBlockAt(tokens, done + offset))) break;
      match.blocks.push_back(held_[block]);
    }
    if (offset < run->blocks.size()) break;
  }
  FindTail(*run, offset, tokens.subspan(match.blocks.size() * kKvBlockTokens), &match);
  return match;
}

// Looks behind the first `offset` blocks of `run` for the block that begins most like `tokens`.
void RadixTree::FindTail(const Run& run, size_t offset, std::span<const int32_t> tokens,
                         PrefixMatch* match) const {
  const auto consider = [&](int32_t block) {
    const std::span<const int32_t> there = TokensOf(block);
    const size_t most = std::min(there.size(), tokens.size());
    const auto differs =
        std::mismatch(there.begin(), there.begin() + static_cast<int64_t>(most), tokens.begin());
    const int same = static_cast<int>(differs.first - there.begin());
    if (same <= match->tail_tokens) return;
    match->tail_tokens = same;
    match->tail = held_[block];
  };
  if (offset < run.blocks.size()) return consider(run.blocks[offset]);
  int left = kTailCandidates;
  for (const Run* child = run.first_child; child != nullptr && left > 0; child = child->next, --left) {
    consider(child->blocks.front());
  }
}

BlockPath RadixTree::PathOf(int32_t block) const {
  const Place place = places_[block];
  MOESAIC_CHECK(place.run != nullptr);
  BlockPath path;
  path.blocks.resize(static_cast<size_t>(place.depth) + 1);
  size_t end = path.blocks.size();
  for (const Run* run = place.run;; run = run->parent) {
    if (run->parent == nullptr) {
      path.name = run->name;
      return path;
    }
    const size_t start = static_cast<size_t>(run->start);
    std::copy_n(run->blocks.begin(), end - start, path.blocks.begin() + static_cast<int64_t>(start));
    end = start;
  }
}

void RadixTree::Use(std::span<const BlockRef> blocks) {
  ++now_;
  if (blocks.empty()) return;
  CutBehind(blocks.back());
  Stamp(blocks, /*counts=*/true, {});
}

void RadixTree::Touch(std::span<const BlockRef> blocks, const SessionHint& hint) {
  const size_t return_too =
      hint.session == Session::kContinues && hint.tokens < std::ssize(blocks) * kKvBlockTokens
          ? KvBlocksFor(hint.tokens)
          : blocks.size();
  if (return_too < blocks.size()) {
    CutBehind(blocks.back());
    Stamp(blocks, /*counts=*/false, {.session = Session::kBehind});
  }
  if (return_too == 0) return;
  blocks = blocks.first(return_too);
  CutBehind(blocks.back());
  Stamp(blocks, /*counts=*/false, hint);
}

// What stands behind `block` becomes a run of its own.
void RadixTree::CutBehind(const BlockRef& block) {
  const Place place = places_[block.index()];
  if (place.depth + 1 < place.run->end()) CutAfter(*place.run, place.depth + 1 - place.run->start);
}

void RadixTree::Stamp(std::span<const BlockRef> blocks, bool counts, const SessionHint& hint) {
  if (blocks.empty()) return;
  MOESAIC_CHECK(held_[blocks.back().index()]);
  for (Run* run = places_[blocks.back().index()].run; run->parent != nullptr; run = run->parent) {
    run->last_use = now_;
    run->session = hint.session;
    run->returns_at = hint.returns_at;
    run->open &= !counts;
    run->parent->likely = run;
    run->parent->likely_tag = run->tag;
    if (!run->queued()) continue;
    queue_.Withdraw(*run);
    Offer(*run);
  }
}

void RadixTree::Insert(std::string_view name, std::span<const int32_t> tokens, std::span<BlockRef> blocks,
                       int known) {
  MOESAIC_CHECK_EQ(tokens.size(), blocks.size() * kKvBlockTokens);
  if (known == static_cast<int>(blocks.size())) return;
  Place place;
  if (known == 0) {
    place = {&MakeRoot(name), -1};
  } else {
    MOESAIC_CHECK(held_[blocks[known - 1].index()]);
    place = places_[blocks[known - 1].index()];
  }
  size_t next = known;
  for (; next < blocks.size(); ++next) {
    const Place there = Next(place, KvBlockAt(tokens, next));
    if (there.run == nullptr) break;
    place = there;
    blocks[next] = held_[place.run->blocks[place.depth - place.run->start]];
  }
  const size_t first = next;
  std::vector<uint64_t> stored;
  for (; next < blocks.size(); ++next) {
    place = Append(place, blocks[next], KvBlockAt(tokens, next));
    stored.push_back(hashes_[blocks[next].index()]);
  }
  if (observer_ == nullptr || stored.empty()) return;
  observer_->Stored(stored, first == 0 ? std::nullopt : std::optional(hashes_[blocks[first - 1].index()]),
                    tokens.subspan(first * kKvBlockTokens), name);
}

// Where the block of `tokens` behind `place` stands; no run: nowhere.
RadixTree::Place RadixTree::Next(Place place, std::span<const int32_t> tokens) const {
  const Run& run = *place.run;
  if (run.parent != nullptr && place.depth + 1 < run.end()) {
    const int32_t block = run.blocks[place.depth + 1 - run.start];
    return Equal(TokensOf(block), tokens) ? Place{place.run, place.depth + 1} : Place{};
  }
  Run* child = FindChild(run, tokens);
  return child == nullptr ? Place{} : Place{child, place.depth + 1};
}

// Puts `block` behind `place`, where no such block is.
RadixTree::Place RadixTree::Append(Place place, const BlockRef& block, std::span<const int32_t> tokens) {
  Run* run = place.run;
  const bool inside = run->parent != nullptr && place.depth + 1 < run->end();
  if (inside) run = &CutAfter(*run, place.depth + 1 - run->start);
  const uint64_t hash = hasher_.Next(EndHash(*run), tokens);
  const int32_t index = block.index();
  std::copy(tokens.begin(), tokens.end(), &tokens_[index * int64_t{kKvBlockTokens}]);
  hashes_[index] = hash;
  if (run->parent == nullptr || !run->open || run->first_child != nullptr) run = &NewChild(*run, hash);
  if (run->blocks.empty()) run->tag = TagOf(tokens);
  run->blocks.push_back(index);
  run->last_use = now_;
  held_[index] = block;
  pool_.SetCached(held_[index], true);
  places_[index] = {run, place.depth + 1};
  ++blocks_;
  return places_[index];
}

RadixTree::Run& RadixTree::NewChild(Run& parent, uint64_t hash) {
  auto made = std::make_unique<Run>();
  Run& run = *made;
  run.parent = &parent;
  run.start = parent.end();
  parent.uses += std::exchange(parent.continued, true) ? 1 : 0;
  run.uses = 1 + policy_->UsesBefore(hash);
  run.open = true;
  run.next = parent.first_child;
  if (run.next != nullptr) run.next->previous = &run;
  parent.first_child = &run;
  Own(std::move(made), hash);
  ++runs_;
  return run;
}

// Cuts `run` in two: its first `count` blocks become a run of their own, which is returned; `run` keeps the
// rest and its children.
RadixTree::Run& RadixTree::CutAfter(Run& run, size_t count) {
  MOESAIC_CHECK(0 < count && count < run.blocks.size());
  auto made = std::make_unique<Run>();
  Run& front = *made;
  const auto cut = run.blocks.begin() + static_cast<int64_t>(count);
  front.blocks.assign(run.blocks.begin(), cut);
  run.blocks.erase(run.blocks.begin(), cut);
  for (const int32_t block : front.blocks) places_[block].run = &front;
  front.start = run.start;
  run.start += static_cast<int64_t>(count);
  front.last_use = run.last_use;
  front.uses = run.uses;
  front.continued = true;
  front.session = run.session;
  front.returns_at = run.returns_at;

  std::unique_ptr<Run> rest = Disown(run, hashes_[front.blocks.front()]);
  front.parent = std::exchange(run.parent, &front);
  front.previous = std::exchange(run.previous, nullptr);
  front.next = std::exchange(run.next, nullptr);
  front.first_child = front.likely = &run;
  front.tag = run.tag;
  front.likely_tag = run.tag = TagOf(TokensOf(run.blocks.front()));
  if (front.parent->likely == &run) front.parent->likely = &front;
  (front.previous == nullptr ? front.parent->first_child : front.previous->next) = &front;
  if (front.next != nullptr) front.next->previous = &front;
  Own(std::move(made), hashes_[front.blocks.front()]);
  Own(std::move(rest), hashes_[run.blocks.front()]);
  ++runs_;
  return front;
}

void RadixTree::Own(std::unique_ptr<Run> run, uint64_t hash) {
  std::unique_ptr<Run>& first = by_hash_[hash];
  run->twin = std::move(first);
  first = std::move(run);
}

std::unique_ptr<RadixTree::Run> RadixTree::Disown(Run& run, uint64_t hash) {
  const auto it = by_hash_.find(hash);
  MOESAIC_CHECK(it != by_hash_.end());
  std::unique_ptr<Run>* link = &it->second;
  while (link->get() != &run) link = &(*link)->twin;
  std::unique_ptr<Run> owned = std::move(*link);
  *link = std::move(owned->twin);
  if (it->second == nullptr) by_hash_.erase(it);
  return owned;
}

EvictionCandidate RadixTree::CandidateOf(const Run& run) const {
  return {.last_use = run.last_use,
          .uses = run.uses,
          .session = run.session,
          .returns_at = run.returns_at,
          .end_position = run.end() * kKvBlockTokens};
}

bool RadixTree::CanShrink(const Run& run) const {
  return run.first_child == nullptr && held_[run.blocks.back()].unique();
}

void RadixTree::OfferNewlyIdle() {
  for (const int32_t block : pool_.TakeNewlyIdle()) {
    if (!held_[block]) continue;  // it has gone since
    Run& run = *places_[block].run;
    if (run.blocks.back() == block && !run.queued() && CanShrink(run)) Offer(run);
  }
}

int RadixTree::Evict(int count) {
  OfferNewlyIdle();
  int gone = 0;
  while (gone < count) {
    Run* const run = First();
    if (run == nullptr) break;
    if (CanShrink(*run)) {
      gone += Shrink(*run, count - gone);
    } else {
      queue_.Withdraw(*run);  // it comes back when its last block is idle or its last child gone
    }
  }
  evicted_ += gone;
  return gone;
}

void RadixTree::Clear() { Evict(pool_.idle_blocks()); }

// Takes up to `count` idle blocks off the end of `run`; those that went.
int RadixTree::Shrink(Run& run, int count) {
  std::vector<uint64_t> removed;
  const EvictionCandidate candidate = CandidateOf(run);
  const uint64_t first_hash = hashes_[run.blocks.front()];
  while (!run.blocks.empty() && static_cast<int>(removed.size()) < count &&
         held_[run.blocks.back()].unique()) {
    const int32_t block = run.blocks.back();
    if (leaving_) leaving_(block);
    run.blocks.pop_back();
    removed.push_back(hashes_[block]);
    pool_.SetCached(held_[block], false);
    held_[block] = BlockRef();
    places_[block] = {};
  }
  const int gone = static_cast<int>(removed.size());
  blocks_ -= gone;
  run.open = false;
  policy_->Gone(candidate, removed.back(), now_);
  if (observer_ != nullptr) observer_->Removed(removed);
  if (run.blocks.empty()) {
    std::unique_ptr<Run> dead = Disown(run, first_hash);
    Drop(run);
  }
  return gone;
}

// Unlinks a run without blocks and children.
void RadixTree::Drop(Run& run) {
  if (run.queued()) queue_.Withdraw(run);
  Run& parent = *run.parent;
  if (parent.likely == &run) parent.likely = nullptr;
  (run.previous == nullptr ? parent.first_child : run.previous->next) = run.next;
  if (run.next != nullptr) run.next->previous = run.previous;
  --runs_;
  if (parent.first_child != nullptr) return;
  if (parent.parent == nullptr) {
    roots_.erase(std::string(parent.name));
  } else if (CanShrink(parent) && !parent.queued()) {
    Offer(parent);
  }
}

void RadixTree::Offer(Run& run) {
  const EvictionCandidate candidate = CandidateOf(run);
  const double returns_at = policy_->ReturnsAt(candidate);
  if (returns_at > static_cast<double>(now_)) {
    queue_.AddAway(run, returns_at);
  } else {
    queue_.AddWorth(run, policy_->Worth(candidate),
                    std::max(static_cast<double>(run.last_use), run.returns_at));
  }
}

// What goes first now; null: there is none.
RadixTree::Run* RadixTree::First() {
  const auto now = static_cast<double>(now_);
  while (EvictionQueue::Entry* due = queue_.Due(now)) {  // and did not come
    queue_.Withdraw(*due);
    Offer(static_cast<Run&>(*due));
  }
  return static_cast<Run*>(queue_.First(now));
}

void RadixTree::CheckStructure() const {
  int blocks = 0, runs = 0;
  std::vector<const Run*> open;
  for (const auto& [name, root] : roots_) {
    MOESAIC_CHECK(root->name == name && root->blocks.empty() && root->first_child != nullptr);
    open.push_back(root.get());
  }
  while (!open.empty()) {
    const Run& parent = *open.back();
    open.pop_back();
    for (const Run* run = parent.first_child; run != nullptr; run = run->next) {
      MOESAIC_CHECK(run->parent == &parent && run->start == parent.end() && !run->blocks.empty());
      MOESAIC_CHECK(run->next == nullptr || run->next->previous == run);
      MOESAIC_CHECK(run->tag == TagOf(TokensOf(run->blocks.front())));
      MOESAIC_CHECK(run->likely == nullptr ||
                    (run->likely->parent == run && run->likely->tag == run->likely_tag));
      MOESAIC_CHECK(FindChild(parent, TokensOf(run->blocks.front())) == run);
      uint64_t hash = EndHash(parent);
      for (size_t i = 0; i < run->blocks.size(); ++i) {
        const int32_t block = run->blocks[i];
        hash = hasher_.Next(hash, TokensOf(block));
        MOESAIC_CHECK(held_[block].index() == block && pool_.cached(block) && hashes_[block] == hash);
        MOESAIC_CHECK(places_[block].run == run &&
                      places_[block].depth == run->start + static_cast<int64_t>(i));
        // Who holds a block holds all before it.
        const bool idle = held_[block].unique();
        if (i > 0) MOESAIC_CHECK(idle || !held_[run->blocks[i - 1]].unique());
        if (i == 0 && parent.parent != nullptr) MOESAIC_CHECK(idle || !held_[parent.blocks.back()].unique());
      }
      blocks += static_cast<int>(run->blocks.size());
      ++runs;
      open.push_back(run);
    }
  }
  MOESAIC_CHECK_EQ(blocks, blocks_);
  MOESAIC_CHECK_EQ(runs, runs_);
  queue_.CheckStructure();
}

}  // namespace moesaic::cache
