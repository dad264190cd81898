// The worker's side of the scheduler: matching, admission, the end of a prefill, retries.
#include "proxy/schedule/scheduler_impl.h"

namespace moesaic::proxy {
namespace {

// Answers within this time belong to one batch of an engine.
constexpr Nanos kSameBatch = kMillisecond;
constexpr Nanos kMinRetryAfter = kSecond;

}  // namespace

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

Admission Scheduler::Impl::Submit(RequestId id, Nanos now, const TenantLimit* limit) {
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
  if (!ChargeTenant(view, *slot, limit != nullptr ? *limit : options_.tenant, now, admission.retry_after)) {
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

bool Scheduler::Impl::Requeue(RequestId id, int failed, bool keeps_prefill, Nanos now) {
  const StateView view(state_.zone());
  const Locked lock(state_.zone());
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr || slot->retries >= options_.max_retries) return false;
  const auto stage = static_cast<Stage>(slot->stage.load(kRelaxed));
  const bool was_decoding = stage == Stage::kDecodeScheduled || stage == Stage::kDecodeRunning;
  if (!was_decoding && stage != Stage::kPrefillScheduled && stage != Stage::kPrefillRunning) return false;
  ++slot->retries;
  const bool again_from_prefill = !was_decoding || !keeps_prefill || slot->facts.mode != Mode::kSequential ||
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
  MoveBack(view, id.slot, again_from_prefill ? Stage::kPrefillWaiting : Stage::kDecodeWaiting, now);
  return true;
}

}  // namespace moesaic::proxy
