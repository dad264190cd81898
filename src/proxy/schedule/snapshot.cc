// Takes the snapshot that one run of the scheduler uses: instances, waiting requests, and their prefixes on
// the instances.
#include <map>
#include <optional>

#include "base/round.h"
#include "proxy/schedule/scheduler_impl.h"

namespace moesaic::proxy {
namespace {

// A match is used again for this long while its request waits.
constexpr Nanos kMatchAge = 50 * kMillisecond;

bool IsExcluded(const std::array<int16_t, kMaxExcluded>& excluded, int id) {
  return std::find(excluded.begin(), excluded.end(), id) != excluded.end();
}

}  // namespace

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
  view.uncached = slot.facts.prompt_tokens - cached;
  view.work = static_cast<Nanos>(models_[0].PrefillNanos(view.uncached, cached));
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
  bool ranked = false;
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
    v.kv_blocks = entry.caps.kv_blocks > 0 ? entry.caps.kv_blocks : entry.reported_kv_blocks;
    v.load = entry.load;
    v.index_state = static_cast<IndexState>(entry.index_state.load(kRelaxed));
    v.busy_since = entry.load.prefill_requests > 0 ? entry.busy_since : 0;
    v.last_scheduled = entry.last_scheduled;
    v.last_prefill_done = entry.last_prefill_done;
    v.prefills = entry.prefills;
    v.model = &models_[entry.model_class];
    instances_.push_back(v);
    if (entry.dp_ranks > 1) ranked = true;
  }
  if (ranked) SetPodWaits(now);
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

// Data-parallel ranks of a pod begin and end their steps together: a rank with nothing to do waits for the
// others. The caller holds the lock.
void Scheduler::Impl::SetPodWaits(Nanos now) {
  std::map<uint32_t, Nanos> ends;  // by pod
  for (const InstanceView& v : instances_) {
    if (v.load.prefill_requests == 0) continue;
    const auto steps = static_cast<Nanos>(
        base::CeilDiv<uint64_t>(std::max<uint64_t>(v.load.prefill_tokens, 1), v.batch_tokens));
    const Nanos step = v.load.prefill_work / steps;
    Nanos& end = ends[v.pod];
    end = std::max(end, step - std::clamp<Nanos>(now - v.busy_since, 0, step));
  }
  const StateView view(state_.zone());
  for (InstanceView& v : instances_) {
    const auto end = ends.find(v.pod);
    if (end != ends.end() && view.instance(v.id).dp_ranks > 1) v.pod_wait = end->second;
  }
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
  // The most that a decode instance of a group holds of the prompt.
  const uint32_t max_matched = std::max<uint32_t>(request.view.facts.prompt_tokens, 1) - 1;
  const auto matched = [&](const InstanceView& instance, const std::vector<uint32_t>& depth) {
    const uint32_t size =
        request.view.facts.block_size == instance.block_size ? request.view.facts.block_size : 0;
    return std::min(depth[instance.id] * size, max_matched);  // the last token is always computed
  };
  group_matched_.clear();
  if (!decode && request.view.facts.mode != Mode::kAggregated) {
    for (const InstanceView& instance : instances_) {
      if (instance.role == Role::kPrefill) continue;
      uint32_t& most = group_matched_[instance.group];
      most = std::max(most, matched(instance, depth_));
    }
  }
  // When a request has failed on every instance there is, it may return to one of them.
  const bool avoids = std::any_of(instances_.begin(), instances_.end(), [&](const InstanceView& instance) {
    return eligible(instance) && !IsExcluded(request.excluded, instance.id);
  });
  for (const InstanceView& instance : instances_) {
    if (!eligible(instance) || (avoids && IsExcluded(request.excluded, instance.id))) continue;
    candidates_.push_back(instance);
    InstanceView& added = candidates_.back();
    added.matched_tokens = matched(instance, depth_);
    added.device_matched_tokens = matched(instance, device_depth_);
    if (const auto held = group_matched_.find(instance.group); held != group_matched_.end())
      added.moved_tokens = request.view.facts.prompt_tokens - held->second;
  }
}

}  // namespace moesaic::proxy
