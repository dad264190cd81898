#include "proxy/index/index_writer.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "proxy/index/instance_set.h"
#include "proxy/index/writers_lock.h"
#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

// Publishers count from 0 or from 1.
constexpr uint64_t kLastFirstNumber = 1;

// Time of a message in microseconds; 0 if it is no valid time.
uint64_t MicrosOf(double seconds) {
  return seconds > 0 ? static_cast<uint64_t>(std::min(seconds * 1e6, 9e18)) : 0;
}

InstanceEntry& EntryOf(const State& state, int instance) {
  return StateView(state.zone()).instance(instance);
}

}  // namespace

// One call: the lock of the writers, and whether this writer may still write.
class IndexWriter::Turn {
 public:
  explicit Turn(IndexWriter& writer) : lock_(writer.state_.zone()), allowed_(writer.MayWrite()) {
    if (allowed_) writer.Continue();
  }
  bool allowed() const { return allowed_; }

 private:
  WritersLock lock_;
  bool allowed_;
};

bool IndexWriter::MayWrite() const {
  if (lease_ && !state_.lease().Holds(lease_)) return false;
  const std::optional<InstanceVersion> version = state_.Version(instance_);
  return version && version->generation == generation_;
}

IndexWriter::IndexWriter(State state, BlockIndex index, int instance, LeaseToken lease,
                         std::optional<uint32_t> generation)
    : state_(state), index_(index), keys_(state.zone()), instance_(instance), lease_(lease) {
  const std::optional<InstanceVersion> version = state_.Version(instance_);
  generation_ = generation ? *generation : version ? version->generation : 0;
  // Otherwise the first call continues: the process that has the lock may be stopped.
  const WritersLock lock(state_.zone(), std::try_to_lock);
  if (lock.is_locked() && MayWrite()) Continue();
}

bool IndexWriter::Ready() const { return WritersLock(state_.zone(), std::try_to_lock).is_locked(); }

// Begins where the process before this one stopped. The caller holds the lock of the writers.
void IndexWriter::Continue() {
  if (std::exchange(continued_, true)) return;
  const uint64_t next = EntryOf(state_, instance_).next_sequence.load(std::memory_order_acquire);
  if (next > 0) tracker_ = SequenceTracker(next - 1);
  // The replay of a process that died is not continued; the gap that caused it is found again.
  if (this->state() == IndexState::kReplaying) SetState(IndexState::kDegraded);
}

IndexState IndexWriter::state() const {
  return static_cast<IndexState>(EntryOf(state_, instance_).index_state.load(std::memory_order_acquire));
}

void IndexWriter::SetState(IndexState state) {
  EntryOf(state_, instance_).index_state.store(static_cast<uint8_t>(state), std::memory_order_release);
}

bool IndexWriter::HistoryLost() const {
  return EntryOf(state_, instance_).history_lost.load(std::memory_order_acquire) != 0;
}

void IndexWriter::SetHistoryLost(bool lost) {
  EntryOf(state_, instance_).history_lost.store(lost ? 1 : 0, std::memory_order_release);
}

void IndexWriter::Applied(uint64_t sequence) {
  tracker_.Applied(sequence);
  EntryOf(state_, instance_).next_sequence.store(sequence + 2, std::memory_order_release);
}

IndexWriter::Result IndexWriter::Begin() {
  const Turn turn(*this);
  if (!turn.allowed()) return {.fenced = true};
  const Result result = StartReplay(tracker_.next().value_or(0));
  beginning_ = true;
  return result;
}

void IndexWriter::OnFeedFailed() {
  const Turn turn(*this);
  if (turn.allowed()) SetState(IndexState::kDegraded);
}

IndexWriter::Result IndexWriter::StartReplay(uint64_t from) {
  SetState(IndexState::kReplaying);
  beginning_ = false;
  replay_next_ = from;
  replay_empty_ = true;
  if (from == 0) {
    ForgetSequence();  // a successor requests everything, too
    asked_for_all_ = true;
  }
  return {.replay_from = from};
}

IndexWriter::Result IndexWriter::Apply(uint64_t sequence, const KvBatch& batch) {
  const Turn turn(*this);
  if (!turn.allowed()) return {.fenced = true};
  return ApplyNext(sequence, batch);
}

IndexWriter::Result IndexWriter::ApplyNext(uint64_t sequence, const KvBatch& batch) {
  ++stats_.batches;
  if (state() == IndexState::kReplaying) return {};  // the replay brings it
  InstanceEntry& entry = EntryOf(state_, instance_);
  const auto time = MicrosOf(batch.time);
  // A smaller number with a later time is not a late message: the publisher counts from the beginning again.
  if (tracker_.next() && sequence < *tracker_.next() && entry.last_time != 0 && time > entry.last_time &&
      tracker_.Check(sequence) == SequenceTracker::Verdict::kDuplicate) {
    Forget();
    return StartReplay(0);
  }
  if (!tracker_.next()) {
    if (sequence > kLastFirstNumber && !asked_for_all_) return StartReplay(0);
    if (state() == IndexState::kNone || (sequence <= kLastFirstNumber && !HistoryLost())) {
      SetState(IndexState::kExact);
    }
  } else {
    switch (tracker_.Check(sequence)) {
      case SequenceTracker::Verdict::kNext:
        if (!HistoryLost())
          SetState(IndexState::kExact);  // the subscription had failed, and nothing was missed
        break;
      case SequenceTracker::Verdict::kDuplicate:
        ++stats_.duplicates;
        return {};
      case SequenceTracker::Verdict::kGap:
        ++stats_.gaps;
        return StartReplay(*tracker_.next());
      case SequenceTracker::Verdict::kRestart:
        Forget();
        SetState(IndexState::kExact);
        break;
    }
  }
  unknown_parent_ = false;
  ApplyEvents(batch);
  Applied(sequence);
  entry.last_time = time;
  if (unknown_parent_ && state() == IndexState::kExact) {
    if (!asked_for_all_) return StartReplay(0);
    SetHistoryLost(true);
    SetState(IndexState::kDegraded);
  }
  return {.applied = true};
}

IndexWriter::Result IndexWriter::ApplyReplay(uint64_t sequence, const KvBatch* batch) {
  const Turn turn(*this);
  if (!turn.allowed()) return {.fenced = true};
  if (!replay_next_) return {};
  if (sequence != kReplayEnd && batch != nullptr) {
    if (sequence < *replay_next_) return {};
    // From 0 means everything, and some publishers begin with 1.
    const bool whole = *replay_next_ == 0 && sequence <= kLastFirstNumber;
    if (whole) {
      SetHistoryLost(false);  // a later gap loses it again
    } else if (sequence != *replay_next_) {
      LoseHistory();
    }
    replay_empty_ = false;
    ApplyEvents(*batch);
    EntryOf(state_, instance_).last_time = MicrosOf(batch->time);
    replay_next_ = sequence + 1;
    if (!tracker_.next() || sequence >= *tracker_.next()) Applied(sequence);
    return {.applied = true};
  }
  EndReplay();
  return {};
}

void IndexWriter::EndReplay() {
  if (replay_empty_ && beginning_) {  // nothing was missing
    asked_for_all_ = false;           // messages may pass before the subscription takes effect
  } else if (replay_empty_) {         // the publisher kept none of the missing messages
    LoseHistory();
    tracker_.Reset();
  }
  replay_next_.reset();
  SetState(HistoryLost() ? IndexState::kDegraded : IndexState::kExact);
}

void IndexWriter::OnReplayFailed() {
  const Turn turn(*this);
  if (!turn.allowed()) return;
  if (state() != IndexState::kReplaying) return;
  LoseHistory();
  tracker_.Reset();
  replay_next_.reset();
  asked_for_all_ = true;
  SetState(IndexState::kDegraded);
}

IndexWriter::Result IndexWriter::Retry() {
  const Turn turn(*this);
  if (!turn.allowed()) return {.fenced = true};
  if (state() != IndexState::kDegraded) return {};
  return StartReplay(0);
}

void IndexWriter::LoseHistory() {
  SetHistoryLost(true);  // first, for a successor of a process that dies between the two
  index_.Clear(instance_);
}

void IndexWriter::Reset() {
  const Turn turn(*this);
  if (turn.allowed()) Forget();
}

void IndexWriter::ForgetSequence() {
  tracker_.Reset();
  EntryOf(state_, instance_).next_sequence.store(0, std::memory_order_release);
}

void IndexWriter::Forget() {
  index_.Clear(instance_);
  ForgetSequence();
  replay_next_.reset();
  EntryOf(state_, instance_).last_time = 0;
  asked_for_all_ = false;
  device_seen_ = false;
  SetHistoryLost(false);
  SetState(IndexState::kNone);
}

void IndexWriter::ApplyEvents(const KvBatch& batch) {
  for (const KvEvent& event : batch.events) {
    ++stats_.events;
    switch (event.type) {
      case KvEvent::Type::kStored:
        Stored(event);
        break;
      case KvEvent::Type::kRemoved:
        Removed(event);
        break;
      case KvEvent::Type::kCleared:
        ++stats_.cleared;
        index_.Clear(instance_);
        // Nothing is in the cache, and that is known: the index is exact from here on.
        SetHistoryLost(false);
        if (state() == IndexState::kDegraded) SetState(IndexState::kExact);
        break;
      case KvEvent::Type::kOther:
        ++stats_.unusable;
        break;
    }
  }
}

// Hybrid models publish a stream per KV group. The prefix that can be reused is that of full attention.
bool IndexWriter::OfPrimaryGroup(const KvEvent& event) {
  if (!event.group) return true;
  if (event.spec_kind == "full_attention" || event.spec_kind == "mla_attention")
    primary_group_ = *event.group;
  return *event.group == primary_group_;
}

Tier IndexWriter::TierOf(const std::string& medium) {
  if (medium.empty() || medium == "GPU") {
    device_seen_ = true;
    return Tier::kDevice;
  }
  // An engine that runs on the CPU has no other memory.
  if (medium.starts_with("CPU")) return device_seen_ ? Tier::kHost : Tier::kDevice;
  return Tier::kDisk;
}

void IndexWriter::Stored(const KvEvent& event) {
  const size_t size = event.block_size;
  if (size == 0 || event.tokens.size() != event.block_hashes.size() * size || !OfPrimaryGroup(event)) {
    ++stats_.unusable;
    return;
  }
  block_size_ = static_cast<uint32_t>(size);
  InstanceEntry& entry = EntryOf(state_, instance_);
  if (entry.block_size != size) {
    const Locked lock(state_.zone());
    entry.block_size = static_cast<uint32_t>(size);
  }
  const Tier tier = TierOf(event.medium);
  uint64_t parent = 0;
  if (event.parent) {
    const auto key = index_.FindEngineHash(instance_, *event.parent);
    if (!key) {
      ++stats_.unknown_parents;
      unknown_parent_ = true;
      return;
    }
    parent = *key;
  } else {
    parent = keys_.Root({.salt = event.cache_salt, .adapter = event.lora_name}, event.block_size);
  }
  const std::span<const int32_t> tokens = event.tokens;
  const std::span<const uint64_t> hashes = event.block_hashes;
  block_keys_.resize(hashes.size());
  for (size_t i = 0; i < hashes.size(); ++i) {
    const std::string_view extra = i < event.extra_keys.size() ? std::string_view(event.extra_keys[i]) : "";
    parent = block_keys_[i] = keys_.Next(parent, tokens.subspan(i * size, size), extra);
  }
  index_.Add(instance_, tier, block_keys_);
  const std::span<const uint64_t> keys = block_keys_;
  for (size_t i = 0; i < keys.size(); ++i) {
    i += index_.MapEngineHashes(instance_, hashes.subspan(i), keys.subspan(i));
    if (i < keys.size()) index_.Remove(instance_, tier, keys[i]);  // no event could remove it
  }
  stats_.stored += keys.size();
}

void IndexWriter::Removed(const KvEvent& event) {
  if (!OfPrimaryGroup(event)) {
    ++stats_.unusable;
    return;
  }
  const Tier tier = TierOf(event.medium);
  for (const uint64_t hash : event.block_hashes) index_.PrefetchEngineHash(instance_, hash);
  block_keys_.clear();
  for (const uint64_t hash : event.block_hashes) {
    if (const auto key = index_.FindEngineHash(instance_, hash)) {
      block_keys_.push_back(*key);
    } else {
      ++stats_.unknown_removals;
    }
  }
  index_.Remove(instance_, tier, block_keys_);
  stats_.removed += block_keys_.size();
  // The hash of a block that remains in another tier is still needed.
  for (const uint64_t hash : event.block_hashes) {
    const auto key = index_.FindEngineHash(instance_, hash);
    if (key && (index_.Tiers(instance_, *key) & kConfirmedTiers) == 0)
      index_.UnmapEngineHash(instance_, hash);
  }
}

}  // namespace moesaic::proxy
