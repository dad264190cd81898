// The master's side of the scheduler: places waiting requests on instances.
#include <limits>
#include <span>
#include <unordered_map>

#include "proxy/schedule/scheduler_impl.h"

namespace moesaic::proxy {
namespace {

// Requests that one run tries to place: a base, plus a number per instance. Beyond them, only those past the
// starvation bound that an instance has room for.
constexpr size_t kScanBase = 16;
constexpr size_t kScanPerInstance = 6;

uint64_t SessionWord(uint64_t session, int instance) {
  return (session & ~uint64_t{0xffff}) | static_cast<uint64_t>(instance + 1);
}

void AddWake(std::vector<int>& wake, int worker) {
  if (worker >= 0 && std::find(wake.begin(), wake.end(), worker) == wake.end()) wake.push_back(worker);
}

}  // namespace

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

// Whether an instance may have room for the request; spares the work for one that certainly stays.
bool Scheduler::Impl::AnyRoom(const RequestView& view) const {
  return std::any_of(instances_.begin(), instances_.end(), [&view](const InstanceView& v) {
    return v.role != Role::kDecode && v.PrefillRoom(view.uncached) &&
           (v.role != Role::kBoth || v.DecodeRoom(view.facts.prompt_tokens));
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
    const size_t num_held = chosen->device_matched_tokens / r.facts.block_size;
    if (ReadKeys(r.id, keys_) && num_held < keys_.size())
      index_.AddSpeculative(first, std::span(keys_).subspan(num_held), now + options_.speculative_ttl);
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
    if (policy_->HoldsCaps() && ++scanned > kScanBase + kScanPerInstance * static_cast<size_t>(engines)) {
      if (!view.must_place) return;  // starved requests come first
      if (!AnyRoom(view)) continue;
    }
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
      if (candidates_.empty() && view.must_place && any) {  // it waits for a decode instance
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
  result_.next_expiry = index_.NextExpiry();
  return result_;
}

}  // namespace moesaic::proxy
