#include "proxy/schedule/scheduler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

// Answers within this time belong to one batch of an engine.
constexpr Nanos kSameBatch = kMillisecond;
// A match is used again for this long while its request waits.
constexpr Nanos kMatchAge = 50 * kMillisecond;
// Maximum requests that one run tries to place: a base, plus a number per instance.
constexpr size_t kScanBase = 16;
constexpr size_t kScanPerInstance = 6;
constexpr Nanos kMinRetryAfter = kSecond;

uint64_t SessionWord(uint64_t session, int instance) {
  return (session & ~uint64_t{0xffff}) | static_cast<uint64_t>(instance + 1);
}

void AddWake(std::vector<int>& wake, int worker) {
  if (worker >= 0 && std::find(wake.begin(), wake.end(), worker) == wake.end()) wake.push_back(worker);
}

Nanos Earlier(Nanos a, Nanos b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

bool IsExcluded(const std::array<int16_t, kMaxExcluded>& excluded, int id) {
  return std::find(excluded.begin(), excluded.end(), id) != excluded.end();
}

}  // namespace

class Scheduler::Impl {
 public:
  Impl(State state, BlockIndex index, std::unique_ptr<Policy> policy, const SchedulerOptions& options)
      : state_(state), index_(index), policy_(std::move(policy)), options_(options) {}

  Admission Submit(RequestId id, Nanos now);
  bool PrefillDone(RequestId id, Nanos now);
  bool Requeue(RequestId id, int failed, Nanos now);
  RunResult Run(LeaseToken lease, Nanos now);
  bool Match(RequestId id, MatchResult& result) const;

  State state_;
  BlockIndex index_;
  std::unique_ptr<Policy> policy_;
  SchedulerOptions options_;

 private:
  struct Waiting {
    RequestView view;
    int worker;
    std::array<int16_t, kMaxExcluded> excluded;
  };
  struct KnownMatch {
    uint32_t generation = 0;
    Nanos time = 0;
    std::vector<InstanceMatch> matches;
  };

  /// Copies the block keys of a request. False: the id is stale.
  bool ReadKeys(RequestId id, std::vector<uint64_t>& keys) const;
  void Snapshot(Nanos now);
  bool AnyStarved(Nanos now);
  RequestView ViewOf(const RequestSlot& slot, uint32_t index, Stage stage, Nanos now) const;
  const std::vector<InstanceMatch>& MatchesOf(const Waiting& request, Nanos now);
  /// Views of the instances that may take the request, with the length of its prefix on each.
  void Candidates(const Waiting& request, bool decode, Nanos now);
  void PlacePrefills(Nanos now);
  void PlaceDecodes(Nanos now);
  bool TrySkipPrefill(const Waiting& request, Nanos now);
  int ShortestQueue(const Waiting& request, Nanos now) const;
  void KeepPairs(const Waiting& request);
  void Reserve();
  bool Commit(const Waiting& request, int prefill, int decode, Nanos now);
  void Reject(const Waiting& request);
  static void MoveUrgentForward(std::vector<RequestView>& queue);
  InstanceView* ViewFor(int id) {
    const auto it =
        std::find_if(instances_.begin(), instances_.end(), [&](const auto& v) { return v.id == id; });
    return it == instances_.end() ? nullptr : &*it;
  }
  void Observe(InstanceEntry& entry, const RequestSlot& slot, Nanos now) const;
  bool TakeTokens(uint64_t tenant, double cost, Nanos now, Nanos& retry_after) const;
  Nanos QueueEstimate(Nanos now) const;

  // Of the current run.
  LeaseToken lease_;
  std::vector<InstanceView> instances_;
  std::array<LatencyCoefficients, kModelClasses> models_;
  std::vector<Waiting> prefill_queue_, decode_queue_;
  std::vector<InstanceView> candidates_;
  std::vector<uint32_t> depth_, device_depth_;  // by instance
  RunResult result_;
  size_t reserved_ = 0;  // instances that were kept for starved requests
  // Matches of waiting requests, by slot.
  std::vector<KnownMatch> known_;
  MatchResult match_;
  mutable std::vector<uint64_t> keys_;
};

// --- The worker's side ---

bool Scheduler::Impl::ReadKeys(RequestId id, std::vector<uint64_t>& keys) const {
  const StateView view(state_.zone());
  keys.clear();
  const Locked lock(state_.zone());
  const RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return false;
  keys.reserve(slot->num_keys);
  for (uint32_t chunk = slot->first_chunk; chunk != kNone; chunk = view.chunk(chunk).next)
    keys.insert(keys.end(), view.chunk(chunk).keys.begin(),
                view.chunk(chunk).keys.begin() + view.chunk(chunk).count);
  return true;
}

bool Scheduler::Impl::Match(RequestId id, MatchResult& result) const {
  if (!ReadKeys(id, keys_)) return false;
  index_.Match(keys_, result);
  return true;
}

bool Scheduler::Impl::TakeTokens(uint64_t tenant, double cost, Nanos now, Nanos& retry_after) const {
  const TenantLimit& limit = options_.tenant;
  if (limit.tokens_per_second <= 0 || tenant == 0) return true;
  const StateView view(state_.zone());
  const double burst = std::max(limit.burst_tokens, 1.0);
  // Linear probing over a few entries; the entry that was used longest ago gives way, as its bucket is the
  // fullest.
  constexpr uint32_t kProbes = 8;
  TenantEntry* entry = nullptr;
  for (uint32_t i = 0; i < kProbes; ++i) {
    TenantEntry& at = view.tenant(static_cast<uint32_t>((tenant + i) % view.options.max_tenants));
    if (at.tenant == tenant) {
      entry = &at;
      break;
    }
    if (entry == nullptr || at.tenant == 0 || (entry->tenant != 0 && at.updated < entry->updated))
      entry = &at;
  }
  if (entry->tenant != tenant) *entry = {.tenant = tenant, .tokens = burst, .updated = now};
  entry->tokens = std::min(
      burst, entry->tokens + limit.tokens_per_second * static_cast<double>(now - entry->updated) / kSecond);
  entry->updated = now;
  // A request beyond the burst passes with a full bucket and leaves it in debt.
  const double needed = std::min(cost, burst);
  if (entry->tokens < needed) {
    retry_after = static_cast<Nanos>((needed - entry->tokens) / limit.tokens_per_second * kSecond) + 1;
    return false;
  }
  entry->tokens -= cost;
  return true;
}

// Predicted time until a request that arrives now is placed. The caller holds the lock.
Nanos Scheduler::Impl::QueueEstimate(Nanos now) const {
  const StateView view(state_.zone());
  Nanos work = 0;
  int engines = 0;
  double per_token = 0;
  for (uint32_t i = 0; i < view.s.num_instances; ++i) {
    const InstanceEntry& entry = view.instance(static_cast<int>(i));
    if (entry.state.load(kRelaxed) != static_cast<uint8_t>(InstanceState::kEnabled) || entry.healthy == 0 ||
        entry.role == static_cast<uint8_t>(Role::kDecode)) {
      continue;
    }
    ++engines;
    per_token = std::max(per_token, view.s.models[entry.model_class].coefficients.per_token);
    work += std::max<Nanos>(entry.load.prefill_work - (now - entry.busy_since), 0);
  }
  for (uint32_t w = 0; w < view.s.bitmap_words; ++w) {
    for (uint64_t bits = view.waiting_prefill()[w].load(kRelaxed); bits != 0; bits &= bits - 1) {
      const RequestSlot& slot = view.slot(w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits)));
      const uint32_t uncached =
          slot.facts.prompt_tokens - std::min(slot.cached_tokens, slot.facts.prompt_tokens);
      work += static_cast<Nanos>(per_token * uncached);
    }
  }
  return work / std::max(engines, 1);
}

Admission Scheduler::Impl::Submit(RequestId id, Nanos now) {
  Admission admission;
  // The prefix is looked up by the worker: all of them together have more time than the master.
  MatchResult found;
  const StateView view(state_.zone());
  if (!Match(id, found)) return {.verdict = Admission::Verdict::kStale, .retry_after = 0};
  const Locked lock(state_.zone());
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr || slot->stage.load(kRelaxed) > static_cast<uint8_t>(Stage::kPrefixMatched))
    return {.verdict = Admission::Verdict::kStale, .retry_after = 0};
  if (view.s.in_stage[static_cast<size_t>(Stage::kPrefillWaiting)] >= options_.queue_limit) {
    return {.verdict = Admission::Verdict::kQueueFull,
            .retry_after = std::max(kMinRetryAfter, QueueEstimate(now))};
  }
  if (options_.queue_time_limit > 0) {
    const Nanos estimate = QueueEstimate(now);
    if (estimate > options_.queue_time_limit) {
      return {.verdict = Admission::Verdict::kTooSlow,
              .retry_after = std::max(kMinRetryAfter, estimate - options_.queue_time_limit)};
    }
  }
  if (!TakeTokens(slot->facts.tenant, double{1} * slot->facts.prompt_tokens + slot->facts.max_tokens, now,
                  admission.retry_after)) {
    return {.verdict = Admission::Verdict::kRateLimited,
            .retry_after = std::max(kMinRetryAfter, admission.retry_after)};
  }
  // The longest prefix on any instance; orders the queue.
  slot->cached_tokens = std::min(found.longest * slot->facts.block_size, slot->facts.prompt_tokens);
  MoveTo(view, id.slot, Stage::kPrefillWaiting, now);
  return admission;
}

// Learns from the end of a prefill. An instance computes its requests one after another, or several in one
// batch, whose answers arrive together. The time of a batch is that since the answers before it, or since it
// was sent to an idle instance.
void Scheduler::Impl::Observe(InstanceEntry& entry, const RequestSlot& slot, Nanos now) const {
  const double pairs = LatencyCoefficients::Pairs(slot.charged_new, slot.charged_cached);
  if (entry.batch_requests > 0 && now - entry.last_prefill_done < kSameBatch) {
    entry.batch_new_tokens += slot.charged_new;
    entry.batch_pairs += pairs;
    ++entry.batch_requests;
  } else {
    if (entry.batch_requests > 0 && entry.last_prefill_done > entry.batch_started) {
      state_.zone().state().models[entry.model_class].ObservePrefill(
          entry.batch_new_tokens, entry.batch_pairs, entry.last_prefill_done - entry.batch_started,
          entry.weight);
    }
    Nanos sent = slot.entered[static_cast<size_t>(Stage::kPrefillRunning)];
    if (sent == 0) sent = slot.entered[static_cast<size_t>(Stage::kPrefillScheduled)];
    entry.batch_started = std::max(sent, entry.last_prefill_done);
    entry.batch_new_tokens = slot.charged_new;
    entry.batch_pairs = pairs;
    entry.batch_requests = 1;
  }
  entry.last_prefill_done = now;
}

bool Scheduler::Impl::PrefillDone(RequestId id, Nanos now) {
  const StateView view(state_.zone());
  const Locked lock(state_.zone());
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr || (slot->flags.load(kRelaxed) & kPrefillCharged) == 0) return false;
  InstanceEntry& entry = view.instance(slot->prefill_instance);
  Observe(entry, *slot, now);
  ReleasePrefill(view, *slot);
  entry.busy_since = now;
  const Stage next = slot->facts.mode == Mode::kSequential ? Stage::kDecodeWaiting : Stage::kDecodeRunning;
  policy_->PrefillDone(slot->prefill_instance, entry.batch_requests, entry.batch_started, now);
  MoveTo(view, id.slot, next, now);
  return true;
}

bool Scheduler::Impl::Requeue(RequestId id, int failed, Nanos now) {
  const StateView view(state_.zone());
  const Locked lock(state_.zone());
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr || slot->retries >= options_.max_retries) return false;
  const auto stage = static_cast<Stage>(slot->stage.load(kRelaxed));
  const bool was_decoding = stage == Stage::kDecodeScheduled || stage == Stage::kDecodeRunning;
  if (!was_decoding && stage != Stage::kPrefillScheduled && stage != Stage::kPrefillRunning) return false;
  ++slot->retries;
  const bool again_from_prefill = !was_decoding || slot->facts.mode != Mode::kSequential ||
                                  (slot->flags.load(kRelaxed) & kPrefillSkipped) != 0;
  if (failed >= 0) slot->excluded[(slot->retries - 1) % kMaxExcluded] = static_cast<int16_t>(failed);
  const auto leave = [&](int32_t& instance) {
    const int32_t old = instance;
    instance = -1;
    if (!view.InstanceUsed(old)) return;
    --view.instance(old).load.references;
    FreeIfUnreferenced(view, old);
  };
  ReleaseDecode(view, *slot);
  leave(slot->decode_instance);
  if (again_from_prefill) {
    ReleasePrefill(view, *slot);
    leave(slot->prefill_instance);
  }
  slot->flags.store(slot->flags.load(kRelaxed) & ~(kTaken | kPrefillSkipped), std::memory_order_release);
  ClearBit(view.scheduled(slot->worker), id.slot);
  MoveTo(view, id.slot, again_from_prefill ? Stage::kPrefillWaiting : Stage::kDecodeWaiting, now);
  return true;
}

// --- The master's side ---

RequestView Scheduler::Impl::ViewOf(const RequestSlot& slot, uint32_t index, Stage stage, Nanos now) const {
  RequestView view;
  view.id = {index, slot.generation};
  view.facts = slot.facts;
  view.received = slot.entered[0];
  view.waiting = now - slot.entered[static_cast<size_t>(stage)];
  view.output_tokens = slot.output_tokens;
  view.prefill_instance = slot.prefill_instance;
  view.must_place = view.waiting >= options_.starvation_bound;
  const uint32_t cached = std::min(slot.cached_tokens, slot.facts.prompt_tokens);
  view.work = static_cast<Nanos>(models_[0].PrefillNanos(slot.facts.prompt_tokens - cached, cached));
  if (slot.facts.session != 0) {
    const uint64_t word = StateView(state_.zone()).session(slot.facts.session >> 16).word.load(kRelaxed);
    if (((word ^ slot.facts.session) & ~uint64_t{0xffff}) == 0)
      view.session_instance = static_cast<int>(word & 0xffff) - 1;
  }
  return view;
}

void Scheduler::Impl::Snapshot(Nanos now) {
  const StateView view(state_.zone());
  instances_.clear();
  prefill_queue_.clear();
  decode_queue_.clear();
  const Locked lock(state_.zone());
  for (int i = 0; i < kModelClasses; ++i) models_[i] = view.s.models[i].coefficients;
  const uint32_t waiting_prefill = view.s.in_stage[static_cast<size_t>(Stage::kPrefillWaiting)];
  if (waiting_prefill + view.s.in_stage[static_cast<size_t>(Stage::kDecodeWaiting)] == 0) return;
  for (uint32_t i = 0; i < view.s.num_instances; ++i) {
    const InstanceEntry& entry = view.instance(static_cast<int>(i));
    if (entry.state.load(kRelaxed) != static_cast<uint8_t>(InstanceState::kEnabled) || entry.healthy == 0 ||
        entry.closed_until > now) {
      if (entry.closed_until > now) result_.next_run = Earlier(result_.next_run, entry.closed_until);
      continue;
    }
    InstanceView v;
    v.id = static_cast<int>(i);
    v.role = static_cast<Role>(entry.role);
    v.group = entry.group;
    v.pod = entry.pod;
    v.dp_rank = entry.dp_rank;
    v.block_size = entry.block_size;
    v.batch_tokens = entry.batch_tokens;
    v.weight = entry.weight;
    v.caps = entry.caps;
    v.load = entry.load;
    v.index_state = static_cast<IndexState>(entry.index_state.load(kRelaxed));
    v.busy_since = entry.load.prefill_requests > 0 ? entry.busy_since : 0;
    v.last_scheduled = entry.last_scheduled;
    v.last_prefill_done = entry.last_prefill_done;
    v.prefills = entry.prefills;
    v.model = &models_[entry.model_class];
    instances_.push_back(v);
  }
  const auto collect = [&](const BitmapWord* bits, Stage stage, std::vector<Waiting>& queue) {
    for (uint32_t w = 0; w < view.s.bitmap_words; ++w) {
      for (uint64_t word = bits[w].load(kRelaxed); word != 0; word &= word - 1) {
        const uint32_t index = w * 64 + static_cast<uint32_t>(__builtin_ctzll(word));
        const RequestSlot& slot = view.slot(index);
        queue.push_back(
            {.view = ViewOf(slot, index, stage, now), .worker = slot.worker, .excluded = slot.excluded});
      }
    }
  };
  collect(view.waiting_decode(), Stage::kDecodeWaiting, decode_queue_);
  // A long queue is read only when something of it can be placed. The oldest request decides about the
  // starvation bound.
  Nanos next = 0;
  result_.waiting_prefill = waiting_prefill;
  if (waiting_prefill == 0) return;
  if (!policy_->MayPlace(instances_, now, next) && decode_queue_.empty() && !AnyStarved(now)) {
    result_.next_run = Earlier(result_.next_run, next);
    return;
  }
  collect(view.waiting_prefill(), Stage::kPrefillWaiting, prefill_queue_);
}

// True when a request has waited for the starvation bound; otherwise the next run is at most at that time.
bool Scheduler::Impl::AnyStarved(Nanos now) {
  const StateView view(state_.zone());
  Nanos oldest = now;
  for (uint32_t w = 0; w < view.s.bitmap_words; ++w) {
    for (uint64_t bits = view.waiting_prefill()[w].load(kRelaxed); bits != 0; bits &= bits - 1) {
      const RequestSlot& slot = view.slot(w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits)));
      oldest = std::min(oldest, slot.entered[static_cast<size_t>(Stage::kPrefillWaiting)]);
    }
  }
  if (now - oldest >= options_.starvation_bound) return true;
  result_.next_run = Earlier(result_.next_run, oldest + options_.starvation_bound);
  return false;
}

const std::vector<InstanceMatch>& Scheduler::Impl::MatchesOf(const Waiting& request, Nanos now) {
  if (known_.empty()) known_.resize(state_.zone().options().max_requests);
  KnownMatch& known = known_[request.view.id.slot];
  if (known.generation != request.view.id.generation || now - known.time > kMatchAge || now < known.time) {
    known.generation = request.view.id.generation;
    known.time = now;
    known.matches.clear();
    if (request.view.facts.block_size != 0 && Match(request.view.id, match_)) known.matches = match_.matches;
  }
  return known.matches;
}

void Scheduler::Impl::Candidates(const Waiting& request, bool decode, Nanos now) {
  const std::vector<InstanceMatch>& matches = MatchesOf(request, now);
  depth_.assign(state_.zone().options().max_instances, 0);
  device_depth_.assign(depth_.size(), 0);
  for (const InstanceMatch& match : matches) {
    depth_[match.instance] = match.blocks;
    device_depth_[match.instance] = match.device_blocks;
  }
  candidates_.clear();
  // A decode instance is chosen in the group of the prefill instance.
  std::optional<uint32_t> group;
  if (decode && request.view.prefill_instance >= 0) {
    const StateView view(state_.zone());
    group = view.instance(request.view.prefill_instance).group;
  }
  const auto eligible = [&](const InstanceView& instance) {
    return instance.role != (decode ? Role::kPrefill : Role::kDecode) && (!group || instance.group == *group);
  };
  // When a request has failed on every instance there is, it may return to one of them.
  const bool avoids = std::any_of(instances_.begin(), instances_.end(), [&](const InstanceView& instance) {
    return eligible(instance) && !IsExcluded(request.excluded, instance.id);
  });
  for (const InstanceView& instance : instances_) {
    if (!eligible(instance) || (avoids && IsExcluded(request.excluded, instance.id))) continue;
    candidates_.push_back(instance);
    InstanceView& added = candidates_.back();
    // The last token of a prompt is always computed.
    const uint32_t max_matched = std::max<uint32_t>(request.view.facts.prompt_tokens, 1) - 1;
    const uint32_t block_size = request.view.facts.block_size;
    const uint32_t size = block_size == instance.block_size ? block_size : 0;
    added.matched_tokens = std::min(depth_[instance.id] * size, max_matched);
    added.device_matched_tokens = std::min(device_depth_[instance.id] * size, max_matched);
  }
}

// The candidate with room and the shortest predicted time until its answer, or -1.
int Scheduler::Impl::ShortestQueue(const Waiting& request, Nanos now) const {
  int best = -1;
  Nanos min_time = std::numeric_limits<Nanos>::max();
  for (const InstanceView& instance : candidates_) {
    const uint32_t tokens = request.view.facts.prompt_tokens;
    if (!instance.PrefillRoom(tokens - instance.matched_tokens)) continue;
    if (instance.role == Role::kBoth && !instance.DecodeRoom(tokens)) continue;
    const Nanos time = instance.QueueTime(now) + instance.PrefillTime(tokens, instance.matched_tokens);
    if (time < min_time) {
      min_time = time;
      best = instance.id;
    }
  }
  return best;
}

// Drops prefill candidates in whose group no decode instance can take the request.
void Scheduler::Impl::KeepPairs(const Waiting& request) {
  std::erase_if(candidates_, [&](const InstanceView& prefill) {
    return std::none_of(instances_.begin(), instances_.end(), [&](const InstanceView& decode) {
      return decode.role != Role::kPrefill && decode.group == prefill.group &&
             (!policy_->HoldsCaps() || decode.DecodeRoom(request.view.facts.prompt_tokens));
    });
  });
}

// No candidate has room for a starved request: keeps the least loaded one from younger requests in this run.
// Younger requests use the others.
void Scheduler::Impl::Reserve() {
  const auto nearest =
      std::min_element(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
        return a.load.prefill_requests + a.load.decode_requests <
               b.load.prefill_requests + b.load.decode_requests;
      });
  if (nearest == candidates_.end() || (reserved_ > 0 && instances_.size() <= reserved_ + 1)) return;
  ++reserved_;
  std::erase_if(instances_, [id = nearest->id](const InstanceView& v) { return v.id == id; });
}

bool Scheduler::Impl::Commit(const Waiting& request, int prefill, int decode, Nanos now) {
  const StateView view(state_.zone());
  const RequestView& r = request.view;
  const auto view_of = [&](int id) -> const InstanceView* {
    for (const InstanceView& candidate : candidates_) {
      if (candidate.id == id) return &candidate;
    }
    return nullptr;
  };
  const int first = prefill >= 0 ? prefill : decode;
  const InstanceView* const chosen = view_of(first);
  const uint32_t cached = chosen == nullptr ? 0 : chosen->matched_tokens;
  const uint32_t uncached = r.facts.prompt_tokens - cached;
  {
    const Locked lock(state_.zone());
    if (!state_.lease().Holds(lease_)) {
      result_.lost_lease = true;
      return false;
    }
    RequestSlot* const slot = view.Find(r.id);
    const Stage from =
        prefill >= 0 || r.prefill_instance < 0 ? Stage::kPrefillWaiting : Stage::kDecodeWaiting;
    if (slot == nullptr || slot->stage.load(kRelaxed) != static_cast<uint8_t>(from) ||
        (slot->flags.load(kRelaxed) & kRejected) != 0) {
      return false;
    }
    for (const int id : {prefill, decode}) {
      if (id < 0) continue;
      const InstanceEntry& entry = view.instance(id);
      if (entry.state.load(kRelaxed) != static_cast<uint8_t>(InstanceState::kEnabled)) return false;
      if (policy_->HoldsCaps()) {  // the counters may have changed since the snapshot
        InstanceView current;
        current.caps = entry.caps;
        current.load = entry.load;
        current.block_size = entry.block_size;
        if (id == prefill && !current.PrefillRoom(uncached)) return false;
        if (id == decode && !current.DecodeRoom(r.facts.prompt_tokens + slot->output_tokens)) return false;
      }
    }
    uint32_t flags = slot->flags.load(kRelaxed) & ~uint32_t{kTaken};
    if (prefill < 0 && from == Stage::kPrefillWaiting) flags |= kPrefillSkipped;
    slot->flags.store(flags, std::memory_order_release);
    if (prefill >= 0) {
      slot->cached_tokens = cached;
      ChargePrefill(view, *slot, prefill, uncached, cached, chosen->AddedTime(r.facts.prompt_tokens, cached),
                    now);
    } else if (from == Stage::kPrefillWaiting) {
      slot->cached_tokens = cached;
    }
    if (decode >= 0) ChargeDecode(view, *slot, decode, r.facts.prompt_tokens);
    MoveTo(view, r.id.slot, prefill >= 0 ? Stage::kPrefillScheduled : Stage::kDecodeScheduled, now);
    if (slot->worker >= 0) SetBit(view.scheduled(slot->worker), r.id.slot);
    if (r.facts.session != 0)
      view.session(r.facts.session >> 16).word.store(SessionWord(r.facts.session, first), kRelaxed);
    // The snapshot follows.
    for (const int id : {prefill, decode}) {
      if (InstanceView* const changed = id < 0 ? nullptr : ViewFor(id)) {
        changed->load = view.instance(id).load;
        changed->busy_since = changed->load.prefill_requests > 0 ? view.instance(id).busy_since : 0;
        changed->last_scheduled = view.instance(id).last_scheduled;
        changed->prefills = view.instance(id).prefills;
      }
    }
  }
  if (chosen != nullptr) policy_->Placed(r, *chosen, now);
  AddWake(result_.wake, request.worker);
  // Blocks that will exist on the instance soon, unless the engine does not announce blocks at all.
  if (r.facts.block_size != 0 && chosen != nullptr && chosen->index_state != IndexState::kNone &&
      options_.speculative_ttl > 0) {
    if (ReadKeys(r.id, keys_)) index_.AddSpeculative(first, keys_, now + options_.speculative_ttl);
  }
  return true;
}

void Scheduler::Impl::Reject(const Waiting& request) {
  const StateView view(state_.zone());
  const Locked lock(state_.zone());
  RequestSlot* const slot = view.Find(request.view.id);
  if (slot == nullptr) return;
  slot->flags.store((slot->flags.load(kRelaxed) | kRejected) & ~uint32_t{kTaken}, std::memory_order_release);
  ClearBit(view.waiting_prefill(), request.view.id.slot);
  if (slot->worker >= 0) SetBit(view.scheduled(slot->worker), request.view.id.slot);
  ++result_.rejected;
  AddWake(result_.wake, request.worker);
}

// Requests past the starvation bound first, the oldest of them first; then by priority; then as the policy
// ordered.
void Scheduler::Impl::MoveUrgentForward(std::vector<RequestView>& queue) {
  std::stable_sort(queue.begin(), queue.end(), [](const auto& a, const auto& b) {
    if (a.must_place != b.must_place) return a.must_place;
    if (a.must_place) return a.waiting > b.waiting;
    return a.facts.priority > b.facts.priority;
  });
}

// A request whose prefix is on a decode instance needs no prefill instance.
bool Scheduler::Impl::TrySkipPrefill(const Waiting& request, Nanos now) {
  if (!policy_->SkipsPrefill() || request.view.facts.mode == Mode::kAggregated) return false;
  const uint32_t tokens = request.view.facts.prompt_tokens;
  Candidates(request, true, now);
  std::erase_if(candidates_, [&](const InstanceView& v) {
    return tokens - v.matched_tokens > options_.skip_prefill_tokens || !v.DecodeRoom(tokens);
  });
  if (candidates_.empty()) return false;
  const Choice choice = policy_->ChooseDecode(request.view, candidates_, now);
  if (choice.kind != Choice::Kind::kPlace || !Commit(request, -1, choice.instance, now)) return false;
  ++result_.placed_decode;
  return true;
}

void Scheduler::Impl::PlacePrefills(Nanos now) {
  int engines = 0;
  bool room = !policy_->HoldsCaps();
  for (const InstanceView& instance : instances_) {
    if (instance.role == Role::kDecode) continue;
    ++engines;
    room |= instance.PrefillRoom(0) && (instance.role != Role::kBoth || instance.DecodeRoom(0));
  }
  result_.waiting_prefill = static_cast<uint32_t>(prefill_queue_.size());
  if (prefill_queue_.empty() || engines == 0) return;
  std::vector<RequestView> order;
  order.reserve(prefill_queue_.size());
  std::unordered_map<uint32_t, size_t> by_slot;
  for (size_t i = 0; i < prefill_queue_.size(); ++i) {
    order.push_back(prefill_queue_[i].view);
    by_slot.emplace(prefill_queue_[i].view.id.slot, i);
    const Nanos bound = prefill_queue_[i].view.waiting >= options_.starvation_bound
                            ? 0
                            : now - prefill_queue_[i].view.waiting + options_.starvation_bound;
    result_.next_run = Earlier(result_.next_run, bound);
  }
  if (!room) return;
  policy_->OrderPrefill(order, engines, now);
  MoveUrgentForward(order);
  size_t scanned = 0;
  for (const RequestView& view : order) {
    if (result_.placed_prefill >= options_.placements_per_run) {
      result_.next_run = now;
      return;
    }
    if (policy_->HoldsCaps() && ++scanned > kScanBase + kScanPerInstance * static_cast<size_t>(engines))
      return;
    const Waiting& request = prefill_queue_[by_slot[view.id.slot]];
    if (TrySkipPrefill(request, now)) {
      --result_.waiting_prefill;
      continue;
    }
    if (result_.lost_lease) return;
    Candidates(request, false, now);
    if (view.facts.mode == Mode::kParallel) {
      const bool any = !candidates_.empty();
      KeepPairs(request);
      if (candidates_.empty() && view.must_place && any) {  // a decode instance is what it waits for
        Candidates(request, true, now);
        Reserve();
        continue;
      }
    }
    if (candidates_.empty()) continue;
    Choice choice = policy_->ChoosePrefill(view, candidates_, now);
    if (choice.kind == Choice::Kind::kReject && !view.must_place) {
      Reject(request);
      --result_.waiting_prefill;
      continue;
    }
    if (view.must_place && choice.kind != Choice::Kind::kPlace) {
      const int free = ShortestQueue(request, now);
      if (free < 0) {
        Reserve();
        continue;
      }
      choice = Choice::Place(free);
    }
    if (choice.kind == Choice::Kind::kHold) {
      result_.next_run = Earlier(result_.next_run, choice.hold_until);
      if (InstanceView* const awaited = ViewFor(choice.instance)) {
        const auto it = std::find_if(candidates_.begin(), candidates_.end(),
                                     [&](const auto& v) { return v.id == awaited->id; });
        awaited->reserved_work += it->AddedTime(view.facts.prompt_tokens, it->matched_tokens);
      }
      continue;
    }
    int decode = view.facts.mode == Mode::kAggregated ? choice.instance : -1;
    if (view.facts.mode == Mode::kParallel) {
      const std::vector<InstanceView> prefill_candidates = candidates_;
      Waiting paired = request;
      paired.view.prefill_instance = choice.instance;
      Candidates(paired, true, now);
      Choice second = policy_->ChooseDecode(paired.view, candidates_, now);
      if (second.kind != Choice::Kind::kPlace && view.must_place) {
        for (const InstanceView& v : candidates_) {
          if (v.DecodeRoom(view.facts.prompt_tokens)) second = Choice::Place(v.id);
        }
      }
      candidates_ = prefill_candidates;
      if (second.kind != Choice::Kind::kPlace) continue;
      decode = second.instance;
    }
    if (Commit(request, choice.instance, decode, now)) {
      ++result_.placed_prefill;
      --result_.waiting_prefill;
    }
    if (result_.lost_lease) return;
  }
}

void Scheduler::Impl::PlaceDecodes(Nanos now) {
  result_.waiting_decode = static_cast<uint32_t>(decode_queue_.size());
  std::vector<RequestView> order;
  std::unordered_map<uint32_t, size_t> by_slot;
  for (size_t i = 0; i < decode_queue_.size(); ++i) {
    order.push_back(decode_queue_[i].view);
    by_slot.emplace(decode_queue_[i].view.id.slot, i);
  }
  policy_->OrderDecode(order, now);
  MoveUrgentForward(order);
  for (const RequestView& view : order) {
    const Waiting& request = decode_queue_[by_slot[view.id.slot]];
    Candidates(request, true, now);
    if (candidates_.empty()) continue;
    Choice choice = policy_->ChooseDecode(view, candidates_, now);
    if (choice.kind != Choice::Kind::kPlace && view.must_place) {
      const auto free = std::find_if(candidates_.begin(), candidates_.end(), [&](const InstanceView& v) {
        return v.DecodeRoom(view.facts.prompt_tokens + view.output_tokens);
      });
      if (free == candidates_.end()) {
        Reserve();
        continue;
      }
      choice = Choice::Place(free->id);
    }
    if (choice.kind != Choice::Kind::kPlace) {
      result_.next_run = Earlier(result_.next_run, choice.hold_until);
      continue;
    }
    if (Commit(request, -1, choice.instance, now)) {
      ++result_.placed_decode;
      --result_.waiting_decode;
    }
    if (result_.lost_lease) return;
  }
}

RunResult Scheduler::Impl::Run(LeaseToken lease, Nanos now) {
  result_ = {};
  reserved_ = 0;
  lease_ = lease;
  if (!state_.lease().Holds(lease)) {
    result_.lost_lease = true;
    return result_;
  }
  index_.Expire(now);
  Snapshot(now);
  // Requests with a finished prefill occupy memory on their instance: they go first.
  if (!decode_queue_.empty()) PlaceDecodes(now);
  if (!result_.lost_lease && !prefill_queue_.empty()) PlacePrefills(now);
  return result_;
}

// --- The interface ---

Scheduler::Scheduler(State state, BlockIndex index, std::unique_ptr<Policy> policy,
                     const SchedulerOptions& options)
    : impl_(std::make_unique<Impl>(state, index, std::move(policy), options)) {}
Scheduler::~Scheduler() = default;
Scheduler::Scheduler(Scheduler&&) noexcept = default;

Admission Scheduler::Submit(RequestId id, Nanos now) { return impl_->Submit(id, now); }
bool Scheduler::PrefillDone(RequestId id, Nanos now) { return impl_->PrefillDone(id, now); }
bool Scheduler::Requeue(RequestId id, int failed, Nanos now) { return impl_->Requeue(id, failed, now); }
RunResult Scheduler::Run(LeaseToken lease, Nanos now) { return impl_->Run(lease, now); }
bool Scheduler::Match(RequestId id, MatchResult& result) const { return impl_->Match(id, result); }
const Policy& Scheduler::policy() const { return *impl_->policy_; }

void Scheduler::ObserveStep(int instance, double batch, double kv_tokens, Nanos time) {
  const StateView view(impl_->state_.zone());
  const Locked lock(impl_->state_.zone());
  if (!view.InstanceUsed(instance)) return;
  const InstanceEntry& entry = view.instance(instance);
  view.s.models[entry.model_class].ObserveStep(batch, kv_tokens, time, entry.weight);
}

LatencyCoefficients Scheduler::Model(uint32_t model_class) const {
  const StateView view(impl_->state_.zone());
  const Locked lock(impl_->state_.zone());
  return view.s.models[std::min<uint32_t>(model_class, kModelClasses - 1)].coefficients;
}

void Scheduler::SetPrior(const LatencyCoefficients& prior) {
  const StateView view(impl_->state_.zone());
  const Locked lock(impl_->state_.zone());
  for (LatencyModel& model : view.s.models) {
    if (model.prefill.samples() == 0 && model.decode.samples() == 0) model.Init(prior);
  }
}

}  // namespace moesaic::proxy
