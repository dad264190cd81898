// Layout of the shared-memory region. Only the library's own files include this header.
//
// A slot is the truth about its request; every counter, list and bitmap can be computed from the slots. A
// process that is killed inside an operation leaves the derived data wrong and each slot valid: a charge
// counts once its flag is set, and the fields of the charge are written before the flag.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proxy/schedule/latency_model.h"
#include "proxy/state/histogram.h"
#include "proxy/state/lease.h"
#include "proxy/state/records.h"
#include "proxy/state/robust_lock.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

inline constexpr uint64_t kZoneMagic = 0x3159585250'4d53ULL;  // "SMPRXY1"
/// Increased with every change of this header or of index/index_layout.h.
inline constexpr uint32_t kZoneVersion = 8;
inline constexpr uint32_t kNone = ~uint32_t{0};
/// Memory order of accesses under the zone's lock, and of hints.
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr int kModelClasses = 16;
inline constexpr uint32_t kKeysPerChunk = 255;
inline constexpr uint32_t kSessions = 1 << 14;
inline constexpr size_t kUrlBytes = 256;

struct ZoneHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;  // sizes of the structures, as a check of the compiler's layout
  uint64_t bytes;
  ZoneOptions options;
  uint64_t state_offset, index_offset;
  std::array<std::byte, 192> secret;  // of block keys
  std::atomic<uint32_t> ready;        // set when formatting is complete
};

/// Intervals between tokens of streams since the last observation of the latency model.
struct DecodeIntervals {
  uint32_t tokens;
  Nanos time;               // of all tokens together
  double batch, kv_tokens;  // sums over the tokens
};

struct InstanceEntry {
  std::atomic<uint8_t> state;  // InstanceState
  uint8_t role;
  uint8_t healthy;
  std::atomic<uint8_t> index_state;   // IndexState
  uint8_t starting;                   // Configure has added it and has not enabled it yet
  uint8_t drain;                      // as configured
  std::atomic<uint8_t> history_lost;  // the index lacks blocks of messages that no replay had
  uint16_t bootstrap_port;
  uint32_t generation, revision, dp_rank, dp_ranks, group, pod, model_class, block_size, batch_tokens, source,
      source_key;
  double weight;
  InstanceCaps caps;
  uint64_t reported_kv_blocks;  // by the engine's metrics; 0: none
  InstanceLoad load;
  Nanos closed_until;
  uint32_t failures;
  Nanos busy_since, last_scheduled, last_prefill_done;
  DecodeIntervals intervals;
  double batch_new_tokens, batch_pairs;  // of prefills that ended together at last_prefill_done
  uint32_t batch_requests;
  Nanos batch_started;
  uint64_t prefills, decodes, completed, failed;
  uint64_t prompt_tokens, cached_tokens, output_tokens;
  std::atomic<uint64_t> next_sequence;  // of KV events, plus one; 0: none was seen
  uint64_t last_time;
  std::array<char, kUrlBytes> url;
};

/// Flags of a slot.
enum SlotFlag : uint32_t {
  kPrefillCharged = 1,
  kDecodeCharged = 2,
  kPrefillSkipped = 4,
  kRejected = 8,
  kTaken = 16,         // the worker knows the last decision
  kSkipInterval = 32,  // the time until the next token does not count for the latency model
};

struct RequestSlot {
  std::atomic<uint32_t> used;
  uint32_t generation;
  uint32_t next_free;
  std::atomic<uint32_t> flags;
  int32_t worker;
  int32_t worker_pid;
  std::atomic<uint8_t> stage;
  PromptFacts facts;
  std::array<Nanos, kNumStages> entered;  // of a queue: the first time, which a retry keeps
  Nanos since;                            // of the current stage
  int32_t prefill_instance, decode_instance;
  uint32_t charged_new, charged_cached;  // prefill charge
  Nanos charged_work;
  uint32_t charged_context, charged_blocks;  // decode charge
  uint32_t cached_tokens, output_tokens, retries;
  uint64_t charged_tokens;  // taken from the tenant's bucket
  Nanos first_token, last_token;
  std::array<int16_t, kMaxExcluded> excluded;
  uint32_t num_keys;
  uint32_t first_chunk;  // kNone: no keys
};

struct KeyChunk {
  uint32_t next;
  uint32_t count;
  std::array<uint64_t, kKeysPerChunk> keys;
};

struct WorkerEntry {
  std::atomic<int32_t> pid;  // 0: free
  uint32_t requests;
};

struct TenantEntry {
  uint64_t tenant;
  double tokens;
  Nanos updated;
};

struct SessionEntry {
  std::atomic<uint64_t> word;  // upper 48 bits of the session, instance + 1 below
};

struct StateLayout {
  RobustLock lock;
  alignas(64) Lease lease;
  alignas(64) uint32_t free_slot;
  uint32_t free_chunk;
  uint32_t slots_used;
  uint32_t chunks_used;
  uint32_t num_instances;  // one more than the largest used number
  uint32_t num_workers;
  std::array<uint32_t, kNumStages> in_stage;
  std::array<uint64_t, kNumStages> entered;
  std::array<uint64_t, kNumOutcomes> outcomes;
  uint64_t prompt_tokens, cached_tokens, output_tokens;
  uint64_t repairs, reclaimed;
  std::array<Histogram, kNumStages> stage_time;
  Histogram ttft, tpot, e2e;
  std::array<LatencyModel, kModelClasses> models;
  // Offsets from the start of the region.
  uint64_t instances, slots, chunks, workers, tenants, sessions;
  uint64_t waiting_prefill, waiting_decode;  // bitmaps over slots: atomic words
  uint64_t scheduled;                        // one bitmap over slots per worker
  uint32_t bitmap_words;
  uint32_t num_chunks;
};

using BitmapWord = std::atomic<uint64_t>;

/// Typed access to the parts of the region.
struct StateView {
  StateView(Zone&&) = delete;  // it would not outlive the view
  explicit StateView(const Zone& zone) : zone(zone), s(zone.state()), options(zone.options()) {}
  InstanceEntry& instance(int id) const { return zone.At<InstanceEntry>(s.instances)[id]; }
  RequestSlot& slot(uint32_t i) const { return zone.At<RequestSlot>(s.slots)[i]; }
  KeyChunk& chunk(uint32_t i) const { return zone.At<KeyChunk>(s.chunks)[i]; }
  WorkerEntry& worker(int i) const { return zone.At<WorkerEntry>(s.workers)[i]; }
  TenantEntry& tenant(uint32_t i) const { return zone.At<TenantEntry>(s.tenants)[i]; }
  SessionEntry& session(uint64_t hash) const { return zone.At<SessionEntry>(s.sessions)[hash % kSessions]; }
  BitmapWord* waiting_prefill() const { return zone.At<BitmapWord>(s.waiting_prefill); }
  BitmapWord* waiting_decode() const { return zone.At<BitmapWord>(s.waiting_decode); }
  BitmapWord* scheduled(int worker) const {
    return zone.At<BitmapWord>(s.scheduled) + static_cast<size_t>(worker) * s.bitmap_words;
  }
  /// The slot of a live request, or null.
  RequestSlot* Find(RequestId id) const {
    if (id.slot >= options.max_requests) return nullptr;
    RequestSlot& found = slot(id.slot);
    return found.used.load(kRelaxed) != 0 && found.generation == id.generation ? &found : nullptr;
  }
  bool InstanceUsed(int id) const {
    return id >= 0 && id < static_cast<int>(s.num_instances) &&
           instance(id).state.load(kRelaxed) != static_cast<uint8_t>(InstanceState::kUnused);
  }

  const Zone& zone;
  StateLayout& s;
  const ZoneOptions& options;
};

/// Holds the zone's lock; repairs the derived data if the last owner died.
class Locked {
 public:
  explicit Locked(const Zone& zone);
  ~Locked() { state_.lock.Unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  StateLayout& state_;
};

inline void SetBit(BitmapWord* bits, uint32_t i) {
  bits[i / 64].fetch_or(uint64_t{1} << (i % 64), std::memory_order_acq_rel);
}
inline void ClearBit(BitmapWord* bits, uint32_t i) {
  bits[i / 64].fetch_and(~(uint64_t{1} << (i % 64)), std::memory_order_acq_rel);
}

// --- Operations on slots; the caller holds the lock ---

/// Moves a slot to `stage`: stamps it, counts it, keeps the bitmaps of the queues.
void MoveTo(const StateView& view, uint32_t slot, Stage stage, Nanos now);
/// Moves a slot back to a queue: the times of the later stages are forgotten.
void MoveBack(const StateView& view, uint32_t slot, Stage queue, Nanos now);
void ChargePrefill(const StateView& view, RequestSlot& slot, int instance, uint32_t new_tokens,
                   uint32_t cached_tokens, Nanos work, Nanos now);
void ReleasePrefill(const StateView& view, RequestSlot& slot);
void ChargeDecode(const StateView& view, RequestSlot& slot, int instance, uint32_t context);
void ReleaseDecode(const StateView& view, RequestSlot& slot);
/// Takes the tokens of a request from its tenant's bucket. False when there are too few; sets `retry_after`.
bool ChargeTenant(const StateView& view, RequestSlot& slot, const TenantLimit& limit, Nanos now,
                  Nanos& retry_after);
/// Replaces the charge by the tokens that the request used.
void SettleTenant(const StateView& view, RequestSlot& slot, Outcome outcome);
/// Learns the time of a decode step from `tokens` further tokens of a stream.
void ObserveInterval(const StateView& view, const RequestSlot& slot, uint32_t tokens, Nanos now);
void FinishSlot(const StateView& view, uint32_t slot, Outcome outcome, Nanos now);
/// Frees an abandoned instance without references.
void FreeIfUnreferenced(const StateView& view, int id);
/// Computes everything that can be derived from the slots.
void Repair(const Zone& zone);
RequestRecord CopyOf(const RequestSlot& slot, uint32_t index);
InstanceRecord CopyOf(const InstanceEntry& entry, int id);

}  // namespace moesaic::proxy
