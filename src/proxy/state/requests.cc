// Requests as their worker sees them.
#include <algorithm>

#include "proxy/state/layout.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {
namespace {

void FreeKeys(const StateView& view, RequestSlot& slot) {
  uint32_t chunk = slot.first_chunk;
  slot.num_keys = 0;
  slot.first_chunk = kNone;
  while (chunk != kNone) {
    const uint32_t next = view.chunk(chunk).next;
    view.chunk(chunk).next = view.s.free_chunk;
    view.s.free_chunk = chunk;
    --view.s.chunks_used;
    chunk = next;
  }
}

// False when there is not enough memory; the slot then has no keys.
bool StoreKeys(const StateView& view, RequestSlot& slot, std::span<const uint64_t> keys) {
  const uint32_t needed = static_cast<uint32_t>((keys.size() + kKeysPerChunk - 1) / kKeysPerChunk);
  if (needed > view.s.num_chunks - view.s.chunks_used) return false;
  uint32_t next = kNone;
  for (uint32_t i = needed; i-- > 0;) {
    const uint32_t index = view.s.free_chunk;
    KeyChunk& chunk = view.chunk(index);
    view.s.free_chunk = chunk.next;
    ++view.s.chunks_used;
    const auto part = keys.subspan(size_t{i} * kKeysPerChunk)
                          .first(std::min<size_t>(kKeysPerChunk, keys.size() - size_t{i} * kKeysPerChunk));
    std::copy(part.begin(), part.end(), chunk.keys.begin());
    chunk.count = static_cast<uint32_t>(part.size());
    chunk.next = next;
    next = index;
  }
  slot.first_chunk = next;
  std::atomic_signal_fence(std::memory_order_release);
  slot.num_keys = static_cast<uint32_t>(keys.size());
  return true;
}

}  // namespace

StatusOr<RequestId> State::Begin(int worker, Nanos now) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (worker < 0 || worker >= static_cast<int>(view.s.num_workers) ||
      view.worker(worker).pid.load(kRelaxed) == 0)
    return InvalidArgument("there is no worker {}", worker);
  const uint32_t index = view.s.free_slot;
  if (index == kNone) return ResourceExhausted("all {} request slots are in use", view.options.max_requests);
  RequestSlot& slot = view.slot(index);
  view.s.free_slot = slot.next_free;
  ++view.s.slots_used;
  if (++slot.generation == 0) slot.generation = 1;
  slot.flags.store(0, kRelaxed);
  slot.worker = worker;
  slot.worker_pid = view.worker(worker).pid.load(kRelaxed);
  slot.facts = {};
  slot.entered.fill(0);
  slot.prefill_instance = slot.decode_instance = -1;
  slot.charged_new = slot.charged_cached = slot.charged_context = slot.charged_blocks = 0;
  slot.charged_work = 0;
  slot.cached_tokens = slot.output_tokens = slot.retries = 0;
  slot.charged_tokens = 0;
  slot.first_token = slot.last_token = 0;
  slot.excluded.fill(-1);
  slot.num_keys = 0;
  slot.first_chunk = kNone;
  slot.entered[0] = slot.since = now;
  slot.stage.store(static_cast<uint8_t>(Stage::kReceived), kRelaxed);
  slot.used.store(1, std::memory_order_release);
  ++view.s.in_stage[0];
  ++view.s.entered[0];
  ++view.worker(worker).requests;
  return RequestId{index, slot.generation};
}

bool State::SetPrompt(RequestId id, const PromptFacts& facts, std::span<const uint64_t> keys) {
  const StateView view(zone_);
  const Locked lock(zone_);
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return false;
  FreeKeys(view, *slot);
  slot->facts = facts;
  if (keys.empty() || facts.block_size == 0 || !StoreKeys(view, *slot, keys)) slot->facts.block_size = 0;
  return true;
}

bool State::Enter(RequestId id, Stage stage, Nanos now) {
  const StateView view(zone_);
  const Locked lock(zone_);
  const RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return false;
  const auto current = static_cast<Stage>(slot->stage.load(kRelaxed));
  bool allowed = false;
  switch (stage) {
    case Stage::kTokenized:
    case Stage::kPrefixMatched:
      allowed = current < stage;
      break;
    case Stage::kPrefillRunning:
      allowed = current == Stage::kPrefillScheduled;
      break;
    case Stage::kDecodeRunning:
      allowed = current == Stage::kDecodeScheduled;
      break;
    default:
      break;
  }
  if (allowed) MoveTo(view, id.slot, stage, now);
  return allowed;
}

bool State::AddOutput(RequestId id, uint32_t tokens, Nanos now) {
  const StateView view(zone_);
  const Locked lock(zone_);
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return false;
  if (tokens == 0) return true;
  if (slot->output_tokens == 0) {
    slot->first_token = now;
    view.s.ttft.Add(now - slot->entered[0]);
  } else {
    ObserveInterval(view, *slot, tokens, now);
  }
  slot->flags.store(slot->flags.load(kRelaxed) & ~uint32_t{kSkipInterval}, std::memory_order_release);
  slot->last_token = now;
  slot->output_tokens += tokens;
  if ((slot->flags.load(kRelaxed) & kDecodeCharged) != 0) {
    InstanceEntry& entry = view.instance(slot->decode_instance);
    entry.load.decode_tokens += tokens;
    const uint32_t size = std::max<uint32_t>(entry.block_size, 1);
    const uint32_t blocks = (slot->charged_context + slot->output_tokens + size - 1) / size;
    if (blocks > slot->charged_blocks) {
      entry.load.kv_blocks += blocks - slot->charged_blocks;
      slot->charged_blocks = blocks;
    }
  }
  return true;
}

void State::SkipInterval(RequestId id) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (RequestSlot* const slot = view.Find(id))
    slot->flags.store(slot->flags.load(kRelaxed) | kSkipInterval, std::memory_order_release);
}

bool State::SetPromptTokens(RequestId id, uint32_t tokens) {
  const StateView view(zone_);
  const Locked lock(zone_);
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return false;
  slot->facts.prompt_tokens = tokens;
  return true;
}

bool State::SetCached(RequestId id, uint32_t tokens) {
  const StateView view(zone_);
  const Locked lock(zone_);
  RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return false;
  slot->cached_tokens = tokens;
  return true;
}

bool State::Finish(RequestId id, Outcome outcome, Nanos now) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (view.Find(id) == nullptr) return false;
  FinishSlot(view, id.slot, outcome, now);
  return true;
}

std::optional<RequestRecord> State::Request(RequestId id) const {
  const StateView view(zone_);
  const Locked lock(zone_);
  const RequestSlot* const slot = view.Find(id);
  if (slot == nullptr) return std::nullopt;
  return CopyOf(*slot, id.slot);
}

bool State::HasScheduled(int worker) const {
  const StateView view(zone_);
  const BitmapWord* const bits = view.scheduled(worker);
  for (uint32_t w = 0; w < view.s.bitmap_words; ++w) {
    if (bits[w].load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

bool State::HasWaiting() const {
  const StateView view(zone_);
  const Locked lock(zone_);  // after a Finish, a request that entered before it is seen
  const auto& in_stage = view.s.in_stage;
  return in_stage[static_cast<size_t>(Stage::kPrefillWaiting)] +
             in_stage[static_cast<size_t>(Stage::kDecodeWaiting)] >
         0;
}

void State::TakeScheduled(int worker, std::vector<RequestId>& scheduled) {
  const StateView view(zone_);
  BitmapWord* const bits = view.scheduled(worker);
  for (uint32_t w = 0; w < view.s.bitmap_words; ++w) {
    if (bits[w].load(std::memory_order_acquire) == 0) continue;
    const Locked lock(zone_);
    for (uint64_t word = bits[w].exchange(0, std::memory_order_acq_rel); word != 0; word &= word - 1) {
      const uint32_t index = w * 64 + static_cast<uint32_t>(__builtin_ctzll(word));
      RequestSlot& slot = view.slot(index);
      if (slot.used.load(kRelaxed) == 0 || slot.worker != worker) continue;
      slot.flags.store(slot.flags.load(kRelaxed) | kTaken, std::memory_order_release);
      scheduled.push_back({index, slot.generation});
    }
  }
}

}  // namespace moesaic::proxy
