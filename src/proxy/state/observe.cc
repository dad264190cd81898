// Reading the state: totals, histograms and the check of invariants.
#include "proxy/state/layout.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {
namespace {

// Sums over slots, to compare with the counters.
struct Sums {
  std::vector<InstanceLoad> loads;
  std::array<uint32_t, kNumStages> in_stage{};
  std::vector<uint32_t> worker_requests;
  uint32_t slots = 0, chunks = 0;
};

bool Bit(const BitmapWord* bits, uint32_t i) { return (bits[i / 64].load(kRelaxed) >> (i % 64) & 1) != 0; }

Status Different(std::string_view what, uint64_t index, uint64_t counter, uint64_t sum) {
  return absl::InternalError(
      fmt::format("{} {}: the counter is {}, the slots give {}", what, index, counter, sum));
}

Status CheckSlot(const StateView& view, uint32_t i, Sums& sums) {
  const RequestSlot& slot = view.slot(i);
  if (slot.used.load(kRelaxed) == 0) {
    if (Bit(view.waiting_prefill(), i) || Bit(view.waiting_decode(), i))
      return absl::InternalError(fmt::format("free slot {} is in a queue", i));
    return OkStatus();
  }
  const uint32_t flags = slot.flags.load(kRelaxed);
  const auto stage = static_cast<Stage>(slot.stage.load(kRelaxed));
  const bool rejected = (flags & kRejected) != 0;
  ++sums.slots;
  ++sums.in_stage[static_cast<size_t>(stage)];
  if (slot.worker >= 0) ++sums.worker_requests[slot.worker];
  for (const int32_t id : {slot.prefill_instance, slot.decode_instance}) {
    if (id < 0) continue;
    if (!view.InstanceUsed(id))
      return absl::InternalError(fmt::format("slot {} names the unused instance {}", i, id));
    ++sums.loads[id].references;
  }
  if ((flags & kPrefillCharged) != 0) {
    InstanceLoad& load = sums.loads[slot.prefill_instance];
    ++load.prefill_requests;
    load.prefill_tokens += slot.charged_new;
    load.prefill_work += slot.charged_work;
  }
  if ((flags & kDecodeCharged) != 0) {
    InstanceLoad& load = sums.loads[slot.decode_instance];
    ++load.decode_requests;
    load.decode_tokens += slot.charged_context + slot.output_tokens;
    load.kv_blocks += slot.charged_blocks;
  }
  if (Bit(view.waiting_prefill(), i) != (stage == Stage::kPrefillWaiting && !rejected))
    return absl::InternalError(
        fmt::format("slot {} in stage {}: wrong bit in the prefill queue", i, StageName(stage)));
  if (Bit(view.waiting_decode(), i) != (stage == Stage::kDecodeWaiting && !rejected))
    return absl::InternalError(
        fmt::format("slot {} in stage {}: wrong bit in the decode queue", i, StageName(stage)));
  uint32_t keys = 0;
  for (uint32_t chunk = slot.first_chunk; chunk != kNone; chunk = view.chunk(chunk).next) {
    if (++sums.chunks > view.s.num_chunks) return absl::InternalError("the key chunks form a cycle");
    keys += view.chunk(chunk).count;
  }
  if (keys != slot.num_keys) return Different("keys of slot", i, slot.num_keys, keys);
  return OkStatus();
}

}  // namespace

Totals State::ReadTotals() const {
  const StateView view(zone_);
  const Locked lock(zone_);
  Totals totals;
  for (int i = 0; i < kNumStages; ++i) {
    totals.in_stage[i] = view.s.in_stage[i];
    totals.entered[i] = view.s.entered[i];
  }
  for (int i = 0; i < kNumOutcomes; ++i) totals.outcomes[i] = view.s.outcomes[i];
  totals.slots_used = view.s.slots_used;
  totals.keys_used = uint64_t{view.s.chunks_used} * kKeysPerChunk;
  totals.repairs = view.s.repairs;
  totals.reclaimed = view.s.reclaimed;
  totals.prompt_tokens = view.s.prompt_tokens;
  totals.cached_tokens = view.s.cached_tokens;
  totals.output_tokens = view.s.output_tokens;
  return totals;
}

// The interval counts when no prefill shared the steps in it. Single intervals are not samples: tokens that
// arrive together have intervals of 0, and the sum of all is right.
void ObserveInterval(const StateView& view, const RequestSlot& slot, uint32_t tokens, Nanos now) {
  constexpr uint32_t kTokensPerSample = 32;
  const uint32_t flags = slot.flags.load(kRelaxed);
  if ((flags & kDecodeCharged) == 0 || (flags & kSkipInterval) != 0) return;
  InstanceEntry& entry = view.instance(slot.decode_instance);
  if (entry.load.prefill_requests > 0 || entry.last_scheduled > slot.last_token ||
      entry.last_prefill_done > slot.last_token)
    return;
  DecodeIntervals& sum = entry.intervals;
  sum.tokens += tokens;
  sum.time += now - slot.last_token;
  sum.batch += double{1} * tokens * entry.load.decode_requests;
  sum.kv_tokens += double{1} * tokens * static_cast<double>(entry.load.decode_tokens);
  if (sum.tokens < kTokensPerSample) return;
  view.s.models[entry.model_class].ObserveStep(sum.batch / sum.tokens, sum.kv_tokens / sum.tokens,
                                               sum.time / sum.tokens, entry.weight);
  sum = {};
}

const Histogram& State::stage_histogram(Stage stage) const {
  return zone_.state().stage_time[static_cast<size_t>(stage)];
}
const Histogram& State::ttft() const { return zone_.state().ttft; }
const Histogram& State::tpot() const { return zone_.state().tpot; }
const Histogram& State::e2e() const { return zone_.state().e2e; }

void State::ForEachRequest(const std::function<void(const RequestRecord&)>& fn) const {
  std::vector<RequestRecord> records;
  {
    const StateView view(zone_);
    const Locked lock(zone_);
    records.reserve(view.s.slots_used);
    for (uint32_t i = 0; i < view.options.max_requests; ++i) {
      if (view.slot(i).used.load(kRelaxed) != 0) records.push_back(CopyOf(view.slot(i), i));
    }
  }
  for (const RequestRecord& record : records) fn(record);
}

Status State::CheckInvariants() const {
  const StateView view(zone_);
  const Locked lock(zone_);
  Sums sums;
  sums.loads.resize(view.options.max_instances);
  sums.worker_requests.resize(view.options.max_workers);
  for (uint32_t i = 0; i < view.options.max_requests; ++i) RETURN_IF_ERROR(CheckSlot(view, i, sums));
  for (uint32_t i = 0; i < view.options.max_instances; ++i) {
    const InstanceLoad &load = view.instance(static_cast<int>(i)).load, &sum = sums.loads[i];
    const std::pair<uint64_t, uint64_t> pairs[] = {{load.prefill_requests, sum.prefill_requests},
                                                   {load.prefill_tokens, sum.prefill_tokens},
                                                   {load.prefill_work, sum.prefill_work},
                                                   {load.decode_requests, sum.decode_requests},
                                                   {load.decode_tokens, sum.decode_tokens},
                                                   {load.kv_blocks, sum.kv_blocks},
                                                   {load.references, sum.references}};
    constexpr std::string_view kNames[] = {"prefill requests of instance", "prefill tokens of instance",
                                           "prefill work of instance",     "decode requests of instance",
                                           "decode tokens of instance",    "KV blocks of instance",
                                           "references to instance"};
    for (size_t f = 0; f < std::size(pairs); ++f) {
      if (pairs[f].first != pairs[f].second) return Different(kNames[f], i, pairs[f].first, pairs[f].second);
    }
  }
  for (int i = 0; i < kNumStages; ++i) {
    if (view.s.in_stage[i] != sums.in_stage[i])
      return Different("requests in stage", i, view.s.in_stage[i], sums.in_stage[i]);
  }
  for (uint32_t i = 0; i < view.options.max_workers; ++i) {
    const uint32_t requests = view.worker(static_cast<int>(i)).requests;
    if (requests != sums.worker_requests[i])
      return Different("requests of worker", i, requests, sums.worker_requests[i]);
  }
  if (view.s.slots_used != sums.slots)
    return Different("used slots of zone", 0, view.s.slots_used, sums.slots);
  if (view.s.chunks_used != sums.chunks)
    return Different("used chunks of zone", 0, view.s.chunks_used, sums.chunks);
  uint32_t free_slots = 0, free_chunks = 0;
  for (uint32_t i = view.s.free_slot; i != kNone; i = view.slot(i).next_free) {
    if (++free_slots > view.options.max_requests) return absl::InternalError("the free slots form a cycle");
  }
  for (uint32_t i = view.s.free_chunk; i != kNone; i = view.chunk(i).next) {
    if (++free_chunks > view.s.num_chunks) return absl::InternalError("the free chunks form a cycle");
  }
  if (free_slots + sums.slots != view.options.max_requests)
    return Different("free slots of zone", 0, free_slots, view.options.max_requests - sums.slots);
  if (free_chunks + sums.chunks != view.s.num_chunks)
    return Different("free chunks of zone", 0, free_chunks, view.s.num_chunks - sums.chunks);
  return OkStatus();
}

}  // namespace moesaic::proxy
