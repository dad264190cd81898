#include "proxy/state/zone.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "base/round.h"
#include "proxy/index/index_layout.h"
#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

constexpr uint64_t kLine = 64;

// Hands out offsets one after another.
class Placer {
 public:
  explicit Placer(uint64_t offset) : offset_(offset) {}
  template <typename T>
  uint64_t Take(uint64_t count) {
    const uint64_t at = base::RoundUp(offset_, kLine);
    offset_ = at + sizeof(T) * count;
    return at;
  }
  uint64_t end() const { return base::RoundUp(offset_, kLine); }

 private:
  uint64_t offset_;
};

uint32_t ChunksFor(const ZoneOptions& options) {
  // Requests shorter than a chunk occupy a whole one.
  return static_cast<uint32_t>(base::CeilDiv(options.request_keys, uint64_t{kKeysPerChunk})) + 64;
}

uint64_t PlaceState(const ZoneOptions& options, uint64_t offset, StateLayout* layout) {
  Placer placer(offset);
  const uint32_t words = base::CeilDiv(options.max_requests, 64U);
  const uint64_t instances = placer.Take<InstanceEntry>(options.max_instances);
  const uint64_t slots = placer.Take<RequestSlot>(options.max_requests);
  const uint64_t chunks = placer.Take<KeyChunk>(ChunksFor(options));
  const uint64_t workers = placer.Take<WorkerEntry>(options.max_workers);
  const uint64_t tenants = placer.Take<TenantEntry>(options.max_tenants);
  const uint64_t sessions = placer.Take<SessionEntry>(kSessions);
  const uint64_t prefill = placer.Take<BitmapWord>(words);
  const uint64_t decode = placer.Take<BitmapWord>(words);
  const uint64_t scheduled = placer.Take<BitmapWord>(uint64_t{words} * options.max_workers);
  if (layout != nullptr) {
    layout->instances = instances;
    layout->slots = slots;
    layout->chunks = chunks;
    layout->workers = workers;
    layout->tenants = tenants;
    layout->sessions = sessions;
    layout->waiting_prefill = prefill;
    layout->waiting_decode = decode;
    layout->scheduled = scheduled;
    layout->bitmap_words = words;
    layout->num_chunks = ChunksFor(options);
  }
  return placer.end();
}

uint32_t StructureSizes() {
  return static_cast<uint32_t>(sizeof(ZoneHeader) + 3 * sizeof(InstanceEntry) + 5 * sizeof(RequestSlot) +
                               7 * sizeof(StateLayout) + 11 * sizeof(IndexLayout) + 13 * sizeof(KeyBucket));
}

ZoneHeader& Header(std::byte* base) { return *reinterpret_cast<ZoneHeader*>(base); }

uint64_t StateOffset() { return base::RoundUp(uint64_t{sizeof(ZoneHeader)}, kLine); }
uint64_t IndexOffset() { return base::RoundUp(StateOffset() + sizeof(StateLayout), kLine); }
uint64_t ArraysOffset() { return base::RoundUp(IndexOffset() + sizeof(IndexLayout), kLine); }

Status CheckOptions(const ZoneOptions& options) {
  if (options.max_instances == 0 || options.max_instances > kMaxInstances)
    return InvalidArgument("a zone holds 1 to {} instances, not {}", kMaxInstances, options.max_instances);
  if (options.max_requests == 0 || options.max_requests > 1 << 20)
    return InvalidArgument("a zone holds 1 to {} requests, not {}", 1 << 20, options.max_requests);
  if (options.max_workers == 0 || options.max_workers > 4096)
    return InvalidArgument("a zone holds 1 to 4096 workers, not {}", options.max_workers);
  if (options.max_tenants == 0) return InvalidArgument("a zone holds at least one tenant, not 0");
  return OkStatus();
}

}  // namespace

size_t Zone::Bytes(const ZoneOptions& options) {
  return PlaceIndex(options, PlaceState(options, ArraysOffset(), nullptr), nullptr);
}

ZoneOptions Zone::Fit(size_t bytes, uint32_t max_instances, uint32_t max_requests, uint32_t max_workers) {
  ZoneOptions options;
  options.max_instances = max_instances;
  options.max_requests = max_requests;
  options.max_workers = max_workers;
  options.request_keys = std::clamp<uint64_t>(bytes / 64, 1 << 12, uint64_t{1} << 23);
  options.index_blocks = 1 << 10;
  const auto scale = [&] {
    options.engine_blocks = options.index_blocks * 2;
    options.shared_blocks = std::max<uint64_t>(options.index_blocks / 64, 64);
    options.speculative_blocks = std::max<uint64_t>(options.index_blocks / 4, 1 << 10);
  };
  scale();
  while (options.index_blocks < uint64_t{1} << 40) {
    const ZoneOptions fits = options;
    options.index_blocks *= 2;
    scale();
    if (Bytes(options) > bytes) return fits;
  }
  return options;
}

StatusOr<Zone> Zone::Create(void* memory, size_t bytes, const ZoneOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  if (reinterpret_cast<uintptr_t>(memory) % kLine != 0)
    return InvalidArgument("the memory of a zone must be aligned to {} bytes", kLine);
  const size_t needed = Bytes(options);
  if (bytes < needed)
    return ResourceExhausted("the zone has {} bytes and needs {}: enlarge it or lower its capacities", bytes,
                             needed);
  // Everything that is not set here is valid as zero. Zero pages of a fresh mapping stay untouched where they
  // can.
  auto* const base = static_cast<std::byte*>(memory);
  std::memset(base, 0, ArraysOffset());
  ZoneHeader& header = Header(base);
  header.magic = kZoneMagic;
  header.version = kZoneVersion;
  header.header_bytes = StructureSizes();
  header.bytes = needed;
  header.options = options;
  header.state_offset = StateOffset();
  header.index_offset = IndexOffset();
  std::random_device device;
  for (size_t i = 0; i < header.secret.size(); i += sizeof(unsigned)) {
    const unsigned word = device();
    std::memcpy(&header.secret[i], &word, sizeof word);
  }
  Zone zone(memory);
  StateLayout& state = zone.state();
  const uint64_t state_end = PlaceState(options, ArraysOffset(), &state);
  std::memset(base + ArraysOffset(), 0, state_end - ArraysOffset());
  state.lock.Init();
  for (LatencyModel& model : state.models) model.Init({});
  PlaceIndex(options, state_end, &zone.index());
  FormatIndex(zone);
  Repair(zone);  // builds the free lists
  state.repairs = 0;
  header.ready.store(1, std::memory_order_release);
  return zone;
}

StatusOr<Zone> Zone::Attach(void* memory, size_t bytes) {
  const ZoneHeader& header = Header(static_cast<std::byte*>(memory));
  if (bytes < sizeof(ZoneHeader) || header.magic != kZoneMagic)
    return absl::FailedPreconditionError("the memory is no zone of this proxy");
  if (header.version != kZoneVersion || header.header_bytes != StructureSizes()) {
    return absl::FailedPreconditionError(
        fmt::format("the zone has layout version {}.{}, this program has {}.{}: it must be formatted again",
                    header.version, header.header_bytes, kZoneVersion, StructureSizes()));
  }
  if (header.ready.load(std::memory_order_acquire) == 0)
    return absl::FailedPreconditionError("the zone was not formatted completely");
  if (header.bytes > bytes)
    return absl::FailedPreconditionError(
        fmt::format("the zone was formatted for {} bytes, and {} are mapped", header.bytes, bytes));
  return Zone(memory);
}

const ZoneOptions& Zone::options() const { return Header(base_).options; }
StateLayout& Zone::state() const { return *At<StateLayout>(Header(base_).state_offset); }
IndexLayout& Zone::index() const { return *At<IndexLayout>(Header(base_).index_offset); }

}  // namespace moesaic::proxy
