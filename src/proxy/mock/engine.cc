#include "proxy/mock/engine.h"

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <random>

#include "base/round.h"
#include "proxy/mock/block_pool.h"

namespace moesaic::proxy {
namespace {

constexpr size_t kKeptMessages = 10'000;
// Share of a transfer that remains at the end of prefill when every layer was sent while the next one was
// computed.
constexpr double kLastLayer = 1.0 / 32;

uint64_t Scrambled(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

enum class Phase : uint8_t { kWaiting, kTransferring, kPrefill, kDecode, kPinned };

struct Sequence {
  MockRequest request;
  Phase phase = Phase::kWaiting;
  uint64_t order = 0;
  std::vector<int32_t> blocks;
  uint32_t target =
      0;  // tokens to compute before the next output: the prompt, after a preemption also outputs
  uint32_t computed = 0;  // tokens in the blocks
  uint32_t hashed = 0;    // blocks that were announced
  uint32_t cached = 0;    // prompt tokens that were found
  uint32_t produced = 0;
  uint32_t chunk = 0;    // tokens of this step
  Nanos ready = 0;       // end of the transfer
  bool counted = false;  // the hit of the first admission is in the statistics
  bool fails = false;
};

}  // namespace

int32_t MockOutputToken(uint64_t seed, uint32_t index) {
  constexpr uint64_t kIds = 1000;
  return static_cast<int32_t>(1 + Scrambled(seed ^ Scrambled(index)) % kIds);
}

class MockEngine::Impl {
 public:
  explicit Impl(const MockEngineOptions& options)
      : options_(options), pool_(options.num_blocks), random_(options.seed) {}

  Status Submit(MockRequest request, Nanos now) {
    Advance(now);
    const uint64_t total = uint64_t{request.prompt_tokens} + request.output_tokens;
    if (request.prompt_tokens == 0) return InvalidArgument("request {}: the prompt is empty", request.id);
    if (request.output_tokens == 0)
      return InvalidArgument("request {}: no output token is wanted", request.id);
    if (by_id_.contains(request.id)) return InvalidArgument("request {} exists already", request.id);
    if (request.prefill_only && request.remote_prefill)
      return InvalidArgument("request {}: prefill_only and remote_prefill exclude each other", request.id);
    if (!request.tokens.empty() && request.tokens.size() != request.prompt_tokens)
      return InvalidArgument("request {}: {} token ids for a prompt of {}", request.id, request.tokens.size(),
                             request.prompt_tokens);
    if (request.keys.size() > request.prompt_tokens / options_.block_size)
      return InvalidArgument("request {}: {} keys for {} full blocks", request.id, request.keys.size(),
                             request.prompt_tokens / options_.block_size);
    if (base::CeilDiv(total, uint64_t{options_.block_size}) > options_.num_blocks) {
      return ResourceExhausted("request {} needs {} tokens of KV cache, the engine has {}", request.id, total,
                               uint64_t{options_.num_blocks} * options_.block_size);
    }
    auto owned = std::make_unique<Sequence>();
    Sequence& s = *owned;
    s.request = std::move(request);
    s.order = next_order_++;
    s.target = s.request.prompt_tokens;
    s.fails = Draw(options_.faults.fail_request);
    by_id_.emplace(s.request.id, std::move(owned));
    waiting_.push_back(&s);
    if (step_end_ == kNever) StartStep(now);
    return OkStatus();
  }

  bool Cancel(uint64_t id, Nanos now) {
    Advance(now);
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return false;
    Drop(it->second.get());
    if (step_end_ == kNever) StartStep(now);
    return true;
  }

  bool ReleaseRemote(uint64_t id, Nanos now) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end() || it->second->phase != Phase::kPinned) return false;
    return Cancel(id, now);
  }

  bool RemoteReady(uint64_t id, Nanos ready, Nanos now) {
    Advance(now);
    const auto it = by_id_.find(id);
    if (it == by_id_.end() || !it->second->request.remote_prefill) return false;
    Sequence& s = *it->second;
    s.request.remote_ready = ready;
    if (s.phase == Phase::kTransferring && s.ready == kNever) StartTransfer(s, now);
    return true;
  }

  void ResetCache(Nanos now) {
    Advance(now);
    std::vector<uint64_t> evicted;
    pool_.Clear(evicted);
    KvEvent cleared;
    cleared.type = KvEvent::Type::kCleared;
    events_.push_back(std::move(cleared));
    // Blocks in use keep their contents, and an engine announces nothing about them: they are announced again
    // here.
    for (const auto& [id, s] : by_id_) s->hashed = std::min(s->hashed, AnnounceAgain(*s));
    SendEvents(now);
  }

  void Restart(Nanos now) {
    Advance(now);
    for (auto& [id, s] : by_id_)
      outputs_.push_back({.id = id, .kind = MockOutput::Kind::kFailed, .time = now});
    by_id_.clear();
    waiting_.clear();
    running_.clear();
    transferring_.clear();
    pool_ = MockBlockPool(options_.num_blocks);
    events_.clear();
    messages_.clear();
    kept_.clear();
    held_.reset();
    next_sequence_ = 0;
    step_end_ = kNever;
  }

  void SetFaults(const MockFaults& faults, Nanos now) {
    Advance(now);
    const double change = faults.slowdown / options_.faults.slowdown;
    options_.faults = faults;
    if (step_end_ == kNever) {
      StartStep(now);  // the engine may have stood still
    } else {
      const auto rest = static_cast<Nanos>(static_cast<double>(step_end_ - now) * change);
      step_end_ = now + std::max<Nanos>(rest, 1);
    }
  }

  void Advance(Nanos now) {
    for (;;) {
      const Nanos next = NextEvent();
      if (next > now) break;
      if (next == step_end_) {
        FinishStep();
      } else {
        StartStep(next);
      }
    }
  }

  // End of the step, or of a transfer or stall while no step runs.
  Nanos NextEvent() const {
    if (step_end_ != kNever) return step_end_;
    Nanos next = kNever;
    for (const Sequence* s : transferring_) next = std::min(next, s->ready);
    if (HasWork() && options_.faults.stall_until > last_time_)
      next = std::min(next, options_.faults.stall_until);
    return next;
  }

  uint32_t CachedBlocks(std::span<const uint64_t> keys) const {
    uint32_t count = 0;
    while (count < keys.size() && pool_.Find(keys[count]) >= 0) ++count;
    return count;
  }

  MockStats Statistics() const {
    MockStats stats = stats_;
    stats.running = static_cast<uint32_t>(running_.size());
    stats.waiting = static_cast<uint32_t>(waiting_.size());
    stats.free_blocks = pool_.num_free();
    return stats;
  }

  MockEngineOptions options_;
  std::vector<MockOutput> outputs_;
  std::vector<MockMessage> messages_;
  std::deque<MockMessage> kept_;

 private:
  bool HasWork() const { return !waiting_.empty() || !running_.empty(); }

  bool Draw(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }

  void FreeBlocks(Sequence& s) {
    // The end of a sequence is less useful than its beginning: it becomes free first.
    for (size_t i = s.blocks.size(); i-- > 0;) pool_.Release(s.blocks[i]);
    s.blocks.clear();
    s.computed = s.hashed = 0;
  }

  void Drop(Sequence* s) {
    FreeBlocks(*s);
    std::erase(waiting_, s);
    std::erase(running_, s);
    std::erase(transferring_, s);
    by_id_.erase(s->request.id);
  }

  // Takes blocks until `tokens` fit; false, with nothing taken, when there are too few.
  bool Grow(Sequence& s, uint32_t tokens) {
    const uint32_t needed = base::CeilDiv(tokens, options_.block_size);
    if (needed <= s.blocks.size()) return true;
    if (needed - s.blocks.size() > pool_.num_free()) return false;
    std::vector<uint64_t> evicted;
    while (s.blocks.size() < needed) s.blocks.push_back(pool_.Take(evicted));
    stats_.evicted_blocks += evicted.size();
    if (!evicted.empty() && options_.emit_events) {
      KvEvent removed;
      removed.type = KvEvent::Type::kRemoved;
      removed.block_hashes = std::move(evicted);
      removed.medium = options_.medium;
      events_.push_back(std::move(removed));
    }
    return true;
  }

  // Gives a waiting sequence its blocks; false when there is no room for it.
  bool Admit(Sequence& s) {
    const uint32_t tokens = s.request.prompt_tokens;
    uint32_t hits = 0;
    if (options_.prefix_caching) {
      const uint32_t most = (tokens - 1) / options_.block_size;  // the last token is computed
      hits = std::min(CachedBlocks(s.request.keys), most);
    }
    // A request that does not fit must not touch the order of the free blocks.
    uint32_t free_hits = 0;
    for (uint32_t i = 0; i < hits; ++i) free_hits += pool_.IsFree(pool_.Find(s.request.keys[i]));
    if (base::CeilDiv(s.target, options_.block_size) - hits + free_hits > pool_.num_free()) return false;
    for (uint32_t i = 0; i < hits; ++i) {
      s.blocks.push_back(pool_.Find(s.request.keys[i]));
      pool_.Reference(s.blocks.back());
    }
    Grow(s, s.target);
    s.hashed = hits;
    s.computed = hits * options_.block_size;
    if (!s.counted) {
      s.counted = true;
      s.cached = s.computed;
      stats_.cached_tokens += s.computed;
      stats_.prompt_tokens += tokens;
    }
    return true;
  }

  void StartTransfer(Sequence& s, Nanos now) {
    if (s.request.remote_ready == kNever) {
      s.ready = kNever;
      return;
    }
    const uint32_t moved =
        s.request.prompt_tokens - std::min(s.request.prompt_tokens, s.computed + s.request.uncomputed_tokens);
    const double share = options_.transfer_per_layer ? kLastLayer : 1;
    const Nanos begin = std::max({now, s.request.remote_ready, link_free_});
    const auto moving = static_cast<Nanos>(options_.transfer_nanos_per_token * moved * share);
    link_free_ = begin + moving;
    s.ready = link_free_ + options_.transfer_latency;
  }

  void AdmitWaiting(Nanos now, uint32_t& budget) {
    while (!waiting_.empty() && budget > 0 &&
           running_.size() + transferring_.size() < options_.max_sequences) {
      Sequence& s = *waiting_.front();
      if (s.request.remote_prefill && s.produced == 0) {
        if (!Admit(s)) return;
        waiting_.pop_front();
        s.phase = Phase::kTransferring;
        transferring_.push_back(&s);
        StartTransfer(s, now);
        continue;
      }
      if (!Admit(s)) return;
      waiting_.pop_front();
      s.phase = Phase::kPrefill;
      running_.push_back(&s);
      s.chunk = std::min(budget, s.target - s.computed);
      budget -= s.chunk;
    }
  }

  // Sequences whose KV has arrived decode from the next step on.
  void EndTransfers(Nanos now) {
    for (size_t i = 0; i < transferring_.size();) {
      Sequence& s = *transferring_[i];
      if (s.ready > now) {
        ++i;
        continue;
      }
      transferring_.erase(transferring_.begin() + static_cast<ptrdiff_t>(i));
      outputs_.push_back({.id = s.request.id, .kind = MockOutput::Kind::kTransferred, .time = s.ready});
      const uint32_t arrived =
          s.request.prompt_tokens - std::min(s.request.uncomputed_tokens, s.request.prompt_tokens);
      s.computed = std::max(s.computed, arrived);
      Announce(s);
      s.phase = s.computed >= s.target ? Phase::kDecode : Phase::kPrefill;
      running_.push_back(&s);
    }
  }

  void PreemptYoungest() {
    const auto it =
        std::max_element(running_.begin(), running_.end(),
                         [](const Sequence* a, const Sequence* b) { return a->order < b->order; });
    Sequence* const s = *it;
    running_.erase(it);
    FreeBlocks(*s);
    s->phase = Phase::kWaiting;
    s->chunk = 0;
    s->target = s->request.prompt_tokens + s->produced;  // outputs are computed again as part of the prompt
    waiting_.push_front(s);
    ++stats_.preemptions;
  }

  void StartStep(Nanos now) {
    last_time_ = now;
    EndTransfers(now);
    step_end_ = kNever;
    if (now < options_.faults.stall_until) return;
    // Every running sequence in decode gets room for one more token.
    for (size_t i = 0; i < running_.size();) {
      Sequence& s = *running_[i];
      if (s.phase != Phase::kDecode || Grow(s, s.computed + 1)) {
        ++i;
        continue;
      }
      PreemptYoungest();
      i = 0;
    }
    uint32_t budget = options_.max_batch_tokens;
    for (Sequence* s : running_) {
      s->chunk = 0;
      if (s->phase == Phase::kDecode && budget > 0) {
        s->chunk = 1;
        --budget;
      }
    }
    for (Sequence* s : running_) {
      if (s->phase != Phase::kPrefill || budget == 0) continue;
      s->chunk = std::min(budget, s->target - s->computed);
      budget -= s->chunk;
    }
    AdmitWaiting(now, budget);
    uint32_t prefill_tokens = 0, decode_rows = 0;
    double pairs = 0, kv = 0;
    for (const Sequence* s : running_) {
      if (s->chunk == 0) continue;
      if (s->phase == Phase::kPrefill) {
        prefill_tokens += s->chunk;
        pairs += LatencyCoefficients::Pairs(s->chunk, s->computed);
      } else {
        ++decode_rows;
        kv += s->computed;
      }
    }
    SendEvents(now);
    if (prefill_tokens == 0 && decode_rows == 0) return;  // idle, or only transfers
    const LatencyCoefficients& t = options_.time;
    double time = 0;
    if (prefill_tokens > 0) time = t.base + t.per_token * prefill_tokens + t.per_pair * pairs;
    if (decode_rows > 0) {
      const double rows = t.per_sequence * decode_rows + t.per_kv_token * kv;
      time += rows + (prefill_tokens > 0 ? 0 : t.step_base);
    }
    time *= options_.faults.slowdown;
    if (options_.jitter > 0)
      time *= std::max(0.2, std::normal_distribution<double>(1, options_.jitter)(random_));
    step_begin_ = now;
    step_end_ = now + std::max<Nanos>(static_cast<Nanos>(time), 1);
    ++stats_.steps;
    stats_.prefill_tokens += prefill_tokens;
    stats_.decode_tokens += decode_rows;
  }

  void FinishStep() {
    const Nanos now = step_end_;
    stats_.busy += now - step_begin_;
    std::vector<Sequence*> ended;
    for (Sequence* s : running_) {
      if (s->chunk == 0) continue;
      s->computed += s->chunk;
      s->chunk = 0;
      Announce(*s);
      if (s->phase == Phase::kPrefill && s->computed < s->target) continue;
      if (s->fails) {
        outputs_.push_back({.id = s->request.id, .kind = MockOutput::Kind::kFailed, .time = now});
        ended.push_back(s);
        continue;
      }
      ++s->produced;
      s->phase = Phase::kDecode;
      const bool last = s->produced >= s->request.output_tokens || s->request.prefill_only;
      outputs_.push_back({.id = s->request.id,
                          .kind = last ? MockOutput::Kind::kFinished : MockOutput::Kind::kToken,
                          .time = now,
                          .tokens = s->produced,
                          .cached_tokens = s->cached});
      if (last) ended.push_back(s);
    }
    for (Sequence* s : ended) {
      std::erase(running_, s);
      if (s->request.prefill_only && !s->fails) {
        s->phase = Phase::kPinned;
      } else {
        Drop(s);
      }
    }
    StartStep(now);
  }

  uint64_t KeyOf(Sequence& s, uint32_t block) {
    const uint32_t size = options_.block_size;
    if (block < s.request.keys.size()) return s.request.keys[block];
    // Blocks of outputs are chained with the engine's hash.
    if (options_.hash == nullptr || s.request.tokens.empty() || block > s.request.keys.size()) return 0;
    std::vector<int32_t> tokens(size);
    for (uint32_t i = 0; i < size; ++i) tokens[i] = TokenAt(s, block * size + i);
    const uint64_t parent = block == 0 ? 0 : s.request.keys[block - 1];
    s.request.keys.push_back(options_.hash(parent, tokens));
    return s.request.keys.back();
  }

  static int32_t TokenAt(const Sequence& s, uint32_t index) {
    const uint32_t prompt = s.request.prompt_tokens;
    return index < prompt ? s.request.tokens[index] : MockOutputToken(s.request.output_seed, index - prompt);
  }

  // Makes full blocks findable and announces those that are new, consecutive ones in one event.
  void Announce(Sequence& s) {
    if (!options_.prefix_caching) return;
    const uint32_t full = s.computed / options_.block_size;
    KvEvent stored;
    for (; s.hashed < full; ++s.hashed) {
      const uint64_t key = KeyOf(s, s.hashed);
      if (key == 0) break;
      if (!pool_.SetHash(s.blocks[s.hashed], key)) {
        FlushStored(stored);
        continue;
      }
      AppendStored(s, s.hashed, key, stored);
    }
    FlushStored(stored);
  }

  // After a reset of the cache: the blocks in use. Returns the number of announced blocks.
  uint32_t AnnounceAgain(Sequence& s) {
    KvEvent stored;
    for (uint32_t i = 0; i < s.hashed; ++i) {
      const uint64_t key = KeyOf(s, i);
      if (pool_.Find(key) == s.blocks[i]) {
        AppendStored(s, i, key, stored);
      } else {
        FlushStored(stored);
      }
    }
    FlushStored(stored);
    return s.hashed;
  }

  void AppendStored(Sequence& s, uint32_t block, uint64_t key, KvEvent& stored) {
    if (!options_.emit_events) return;
    const uint32_t size = options_.block_size;
    if (stored.block_hashes.empty()) {
      stored.type = KvEvent::Type::kStored;
      if (block > 0) stored.parent = s.request.keys[block - 1];
      stored.block_size = size;
      stored.medium = options_.medium;
    }
    stored.block_hashes.push_back(key);
    if (s.request.tokens.empty()) return;
    for (uint32_t t = block * size; t < (block + 1) * size; ++t) stored.tokens.push_back(TokenAt(s, t));
  }

  void FlushStored(KvEvent& stored) {
    if (!stored.block_hashes.empty()) events_.push_back(std::move(stored));
    stored = {};
  }

  void SendEvents(Nanos now) {
    if (events_.empty()) return;
    MockMessage message = {
        .sequence = next_sequence_++, .time = now, .events = std::move(events_), .truncated = false};
    events_.clear();
    kept_.push_back(message);
    if (kept_.size() > kKeptMessages) kept_.pop_front();
    if (Draw(options_.faults.drop_message)) return;
    message.truncated = Draw(options_.faults.truncate_message);
    const bool twice = Draw(options_.faults.duplicate_message);
    if (!held_ && Draw(options_.faults.swap_messages)) {
      held_ = std::move(message);
      return;
    }
    messages_.push_back(message);
    if (twice) messages_.push_back(std::move(message));
    if (held_) {
      messages_.push_back(std::move(*held_));
      held_.reset();
    }
  }

  MockBlockPool pool_;
  std::mt19937_64 random_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Sequence>> by_id_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_, transferring_;
  std::vector<KvEvent> events_;
  std::optional<MockMessage> held_;
  uint64_t next_sequence_ = 0, next_order_ = 0;
  Nanos step_begin_ = 0, step_end_ = kNever, link_free_ = 0, last_time_ = 0;
  MockStats stats_;
};

MockEngine::MockEngine(const MockEngineOptions& options) : impl_(std::make_unique<Impl>(options)) {}
MockEngine::~MockEngine() = default;
MockEngine::MockEngine(MockEngine&&) noexcept = default;

Status MockEngine::Submit(MockRequest request, Nanos now) { return impl_->Submit(std::move(request), now); }
bool MockEngine::Cancel(uint64_t id, Nanos now) { return impl_->Cancel(id, now); }
bool MockEngine::ReleaseRemote(uint64_t id, Nanos now) { return impl_->ReleaseRemote(id, now); }
bool MockEngine::RemoteReady(uint64_t id, Nanos ready, Nanos now) {
  return impl_->RemoteReady(id, ready, now);
}
void MockEngine::ResetCache(Nanos now) { impl_->ResetCache(now); }
void MockEngine::Restart(Nanos now) { impl_->Restart(now); }
void MockEngine::Advance(Nanos now) { impl_->Advance(now); }
Nanos MockEngine::NextEvent() const { return impl_->NextEvent(); }

void MockEngine::TakeOutputs(std::vector<MockOutput>& outputs) {
  outputs.insert(outputs.end(), impl_->outputs_.begin(), impl_->outputs_.end());
  impl_->outputs_.clear();
}

void MockEngine::TakeMessages(std::vector<MockMessage>& messages) {
  std::move(impl_->messages_.begin(), impl_->messages_.end(), std::back_inserter(messages));
  impl_->messages_.clear();
}

std::vector<MockMessage> MockEngine::Replay(uint64_t sequence) const {
  std::vector<MockMessage> messages;
  for (const MockMessage& message : impl_->kept_) {
    if (message.sequence >= sequence) messages.push_back(message);
  }
  return messages;
}

uint32_t MockEngine::CachedBlocks(std::span<const uint64_t> keys) const { return impl_->CachedBlocks(keys); }
MockStats MockEngine::stats() const { return impl_->Statistics(); }
const MockEngineOptions& MockEngine::options() const { return impl_->options_; }
void MockEngine::SetFaults(const MockFaults& faults, Nanos now) { impl_->SetFaults(faults, now); }

}  // namespace moesaic::proxy
