// Operations on slots, and the repair after the death of a process. The caller holds the zone's lock.
#include <algorithm>
#include <cstring>

#include "base/round.h"
#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

constexpr auto kRelease = std::memory_order_release;

bool InQueue(const RequestSlot& slot, Stage stage) {
  return slot.stage.load(kRelaxed) == static_cast<uint8_t>(stage) &&
         (slot.flags.load(kRelaxed) & kRejected) == 0;
}

bool WorkerMustLook(const RequestSlot& slot) {
  const auto stage = static_cast<Stage>(slot.stage.load(kRelaxed));
  const uint32_t flags = slot.flags.load(kRelaxed);
  return (flags & kTaken) == 0 &&
         ((flags & kRejected) != 0 || stage == Stage::kPrefillScheduled || stage == Stage::kDecodeScheduled);
}

void AddLoad(InstanceLoad& load, const RequestSlot& slot, bool prefill, bool decode) {
  if (prefill) {
    ++load.prefill_requests;
    load.prefill_tokens += slot.charged_new;
    load.prefill_work += slot.charged_work;
  }
  if (decode) {
    ++load.decode_requests;
    load.decode_tokens += slot.charged_context + slot.output_tokens;
    load.kv_blocks += slot.charged_blocks;
  }
}

// A slot names an instance when a charge or a decision refers to it.
void AddReferences(const StateView& view, const RequestSlot& slot, int delta) {
  for (const int32_t id : {slot.prefill_instance, slot.decode_instance}) {
    if (view.InstanceUsed(id)) view.instance(id).load.references += delta;
  }
}

}  // namespace

void FreeIfUnreferenced(const StateView& view, int id) {
  if (!view.InstanceUsed(id)) return;
  InstanceEntry& entry = view.instance(id);
  if (entry.state.load(kRelaxed) == static_cast<uint8_t>(InstanceState::kAbandoned) &&
      entry.load.references == 0)
    entry.state.store(static_cast<uint8_t>(InstanceState::kUnused), kRelease);
}

void MoveTo(const StateView& view, uint32_t index, Stage stage, Nanos now) {
  RequestSlot& slot = view.slot(index);
  const auto old = static_cast<Stage>(slot.stage.load(kRelaxed));
  now = std::max(now, slot.since);  // the master may have read the clock before the request came
  if (old != stage) {
    view.s.stage_time[static_cast<size_t>(old)].Add(now - slot.since);
    --view.s.in_stage[static_cast<size_t>(old)];
    ++view.s.in_stage[static_cast<size_t>(stage)];
  }
  slot.entered[static_cast<size_t>(stage)] = slot.since = now;
  slot.stage.store(static_cast<uint8_t>(stage), kRelease);
  ++view.s.entered[static_cast<size_t>(stage)];
  if (old == Stage::kPrefillWaiting) ClearBit(view.waiting_prefill(), index);
  if (old == Stage::kDecodeWaiting) ClearBit(view.waiting_decode(), index);
  if (stage == Stage::kPrefillWaiting) SetBit(view.waiting_prefill(), index);
  if (stage == Stage::kDecodeWaiting) SetBit(view.waiting_decode(), index);
}

void MoveBack(const StateView& view, uint32_t index, Stage queue, Nanos now) {
  RequestSlot& slot = view.slot(index);
  const Nanos first = slot.entered[static_cast<size_t>(queue)];
  MoveTo(view, index, queue, now);
  // The starvation bound counts from the first wait.
  if (first != 0) slot.entered[static_cast<size_t>(queue)] = first;
  for (size_t later = static_cast<size_t>(queue) + 1; later < kNumStages; ++later) slot.entered[later] = 0;
}

void ChargePrefill(const StateView& view, RequestSlot& slot, int instance, uint32_t new_tokens,
                   uint32_t cached_tokens, Nanos work, Nanos now) {
  slot.prefill_instance = instance;
  slot.charged_new = new_tokens;
  slot.charged_cached = cached_tokens;
  slot.charged_work = work;
  slot.flags.store(slot.flags.load(kRelaxed) | kPrefillCharged, kRelease);
  InstanceEntry& entry = view.instance(instance);
  if (entry.load.prefill_requests == 0) entry.busy_since = now;
  AddLoad(entry.load, slot, true, false);
  ++entry.load.references;
  ++entry.prefills;
  entry.last_scheduled = now;
}

void ReleasePrefill(const StateView& view, RequestSlot& slot) {
  const uint32_t flags = slot.flags.load(kRelaxed);
  if ((flags & kPrefillCharged) == 0) return;
  slot.flags.store(flags & ~kPrefillCharged, kRelease);
  InstanceLoad& load = view.instance(slot.prefill_instance).load;
  --load.prefill_requests;
  load.prefill_tokens -= slot.charged_new;
  load.prefill_work -= slot.charged_work;
}

void ChargeDecode(const StateView& view, RequestSlot& slot, int instance, uint32_t context) {
  InstanceEntry& entry = view.instance(instance);
  slot.decode_instance = instance;
  slot.charged_context = context;
  slot.charged_blocks = base::CeilDiv(context, std::max<uint32_t>(entry.block_size, 1));
  slot.flags.store(slot.flags.load(kRelaxed) | kDecodeCharged, kRelease);
  AddLoad(entry.load, slot, false, true);
  ++entry.load.references;
  ++entry.decodes;
}

void ReleaseDecode(const StateView& view, RequestSlot& slot) {
  const uint32_t flags = slot.flags.load(kRelaxed);
  if ((flags & kDecodeCharged) == 0) return;
  slot.flags.store(flags & ~kDecodeCharged, kRelease);
  InstanceLoad& load = view.instance(slot.decode_instance).load;
  --load.decode_requests;
  load.decode_tokens -= slot.charged_context + slot.output_tokens;
  load.kv_blocks -= slot.charged_blocks;
}

void FinishSlot(const StateView& view, uint32_t index, Outcome outcome, Nanos now) {
  RequestSlot& slot = view.slot(index);
  SettleTenant(view, slot, outcome);
  ReleasePrefill(view, slot);
  ReleaseDecode(view, slot);
  AddReferences(view, slot, -1);
  const int32_t prefill = slot.prefill_instance, decode = slot.decode_instance;
  const bool completed = outcome == Outcome::kCompleted;
  for (const int32_t id : {prefill, decode == prefill ? -1 : decode}) {
    if (!view.InstanceUsed(id)) continue;
    if (completed) ++view.instance(id).completed;
    if (outcome == Outcome::kFailed) ++view.instance(id).failed;
  }
  if (const int32_t computed = prefill >= 0 ? prefill : decode; completed && view.InstanceUsed(computed)) {
    view.instance(computed).prompt_tokens += slot.facts.prompt_tokens;
    view.instance(computed).cached_tokens += slot.cached_tokens;
  }
  if (view.InstanceUsed(decode)) view.instance(decode).output_tokens += slot.output_tokens;
  slot.prefill_instance = slot.decode_instance = -1;
  if (completed) {
    view.s.e2e.Add(now - slot.entered[0]);
    view.s.prompt_tokens += slot.facts.prompt_tokens;
    view.s.cached_tokens += slot.cached_tokens;
    view.s.output_tokens += slot.output_tokens;
    if (slot.output_tokens > 1)
      view.s.tpot.Add((slot.last_token - slot.first_token) / (slot.output_tokens - 1));
  }
  ++view.s.outcomes[static_cast<size_t>(outcome)];
  MoveTo(view, index, Stage::kDone, now);
  --view.s.in_stage[static_cast<size_t>(Stage::kDone)];
  if (slot.worker >= 0) {
    ClearBit(view.scheduled(slot.worker), index);
    --view.worker(slot.worker).requests;
  }
  // The keys return to the free list.
  uint32_t chunk = slot.first_chunk;
  slot.first_chunk = kNone;
  slot.num_keys = 0;
  slot.used.store(0, kRelease);
  while (chunk != kNone) {
    KeyChunk& freed = view.chunk(chunk);
    const uint32_t next = freed.next;
    freed.next = view.s.free_chunk;
    view.s.free_chunk = chunk;
    --view.s.chunks_used;
    chunk = next;
  }
  slot.next_free = view.s.free_slot;
  view.s.free_slot = index;
  --view.s.slots_used;
  FreeIfUnreferenced(view, prefill);
  FreeIfUnreferenced(view, decode);
}

void Repair(const Zone& zone) {
  const StateView view(zone);
  StateLayout& s = view.s;
  s.num_instances = 0;
  for (uint32_t i = 0; i < view.options.max_instances; ++i) {
    view.instance(static_cast<int>(i)).load = {};
    if (view.instance(static_cast<int>(i)).state.load(kRelaxed) != 0) s.num_instances = i + 1;
  }
  s.num_workers = 0;
  for (uint32_t i = 0; i < view.options.max_workers; ++i) {
    view.worker(static_cast<int>(i)).requests = 0;
    if (view.worker(static_cast<int>(i)).pid.load(kRelaxed) != 0) s.num_workers = i + 1;
    for (uint32_t w = 0; w < s.bitmap_words; ++w) view.scheduled(static_cast<int>(i))[w].store(0, kRelaxed);
  }
  for (uint32_t w = 0; w < s.bitmap_words; ++w) {
    view.waiting_prefill()[w].store(0, kRelaxed);
    view.waiting_decode()[w].store(0, kRelaxed);
  }
  s.in_stage.fill(0);
  s.slots_used = s.chunks_used = 0;
  s.free_slot = s.free_chunk = kNone;
  // Chunks of live slots are marked by their count; free ones have none.
  for (uint32_t i = 0; i < s.num_chunks; ++i) view.chunk(i).count &= ~(1U << 31);
  for (uint32_t i = view.options.max_requests; i-- > 0;) {
    RequestSlot& slot = view.slot(i);
    if (slot.used.load(kRelaxed) == 0) {
      slot.next_free = s.free_slot;
      s.free_slot = i;
      continue;
    }
    ++s.slots_used;
    ++s.in_stage[slot.stage.load(kRelaxed)];
    const uint32_t flags = slot.flags.load(kRelaxed);
    if ((flags & kPrefillCharged) != 0) AddLoad(view.instance(slot.prefill_instance).load, slot, true, false);
    if ((flags & kDecodeCharged) != 0) AddLoad(view.instance(slot.decode_instance).load, slot, false, true);
    // An operation that died between two fields may have named an instance without the charge. The name alone
    // counts as a reference, as it does in every other place.
    AddReferences(view, slot, 1);
    if (InQueue(slot, Stage::kPrefillWaiting)) SetBit(view.waiting_prefill(), i);
    if (InQueue(slot, Stage::kDecodeWaiting)) SetBit(view.waiting_decode(), i);
    if (slot.worker >= 0) {
      ++view.worker(slot.worker).requests;
      if (WorkerMustLook(slot)) SetBit(view.scheduled(slot.worker), i);
    }
    for (uint32_t chunk = slot.first_chunk; chunk != kNone; chunk = view.chunk(chunk).next) {
      view.chunk(chunk).count |= 1U << 31;
      ++s.chunks_used;
    }
  }
  for (uint32_t i = s.num_chunks; i-- > 0;) {
    KeyChunk& chunk = view.chunk(i);
    if ((chunk.count & 1U << 31) != 0) {
      chunk.count &= ~(1U << 31);
    } else {
      chunk.next = s.free_chunk;
      s.free_chunk = i;
    }
  }
  for (uint32_t i = 0; i < s.num_instances; ++i) FreeIfUnreferenced(view, static_cast<int>(i));
  ++s.repairs;
}

Locked::Locked(const Zone& zone) : state_(zone.state()) {
  if (state_.lock.Lock() == RobustLock::Acquired::kRepair) Repair(zone);
}

RequestRecord CopyOf(const RequestSlot& slot, uint32_t index) {
  RequestRecord record;
  const uint32_t flags = slot.flags.load(kRelaxed);
  record.id = {index, slot.generation};
  record.worker = slot.worker;
  record.stage = static_cast<Stage>(slot.stage.load(kRelaxed));
  record.entered = slot.entered;
  record.facts = slot.facts;
  record.prefill_instance = slot.prefill_instance;
  record.decode_instance = slot.decode_instance;
  record.cached_tokens = slot.cached_tokens;
  record.output_tokens = slot.output_tokens;
  record.retries = slot.retries;
  record.first_token = slot.first_token;
  record.last_token = slot.last_token;
  record.prefill_charged = (flags & kPrefillCharged) != 0;
  record.decode_charged = (flags & kDecodeCharged) != 0;
  record.prefill_skipped = (flags & kPrefillSkipped) != 0;
  record.rejected = (flags & kRejected) != 0;
  record.charged_work = slot.charged_work;
  record.excluded = slot.excluded;
  record.num_keys = slot.num_keys;
  return record;
}

InstanceRecord CopyOf(const InstanceEntry& entry, int id) {
  InstanceRecord record;
  record.id = id;
  record.generation = entry.generation;
  record.revision = entry.revision;
  record.config = {.url = std::string(entry.url.data(), strnlen(entry.url.data(), entry.url.size())),
                   .role = static_cast<Role>(entry.role),
                   .dp_rank = entry.dp_rank,
                   .dp_ranks = entry.dp_ranks,
                   .group = entry.group,
                   .pod = entry.pod,
                   .model_class = entry.model_class,
                   .block_size = entry.block_size,
                   .weight = entry.weight,
                   .caps = entry.caps,
                   .batch_tokens = entry.batch_tokens,
                   .source = entry.source,
                   .source_key = entry.source_key,
                   .bootstrap_port = entry.bootstrap_port,
                   .drain = entry.drain != 0};
  record.state = static_cast<InstanceState>(entry.state.load(kRelaxed));
  record.healthy = entry.healthy != 0;
  record.closed_until = entry.closed_until;
  record.failures = entry.failures;
  record.reported_kv_blocks = entry.reported_kv_blocks;
  record.load = entry.load;
  record.index_state = static_cast<IndexState>(entry.index_state.load(kRelaxed));
  record.busy_since = entry.load.prefill_requests > 0 ? entry.busy_since : 0;
  record.last_scheduled = entry.last_scheduled;
  record.last_prefill_done = entry.last_prefill_done;
  record.prefills = entry.prefills;
  record.decodes = entry.decodes;
  record.completed = entry.completed;
  record.failed = entry.failed;
  record.prompt_tokens = entry.prompt_tokens;
  record.cached_tokens = entry.cached_tokens;
  record.output_tokens = entry.output_tokens;
  return record;
}

}  // namespace moesaic::proxy
