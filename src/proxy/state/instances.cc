// Instances and workers.
#include <algorithm>
#include <cstring>
#include <utility>

#include "proxy/index/block_index.h"
#include "proxy/index/writers_lock.h"
#include "proxy/state/layout.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {
namespace {

InstanceState StateOf(const InstanceEntry& entry) {
  return static_cast<InstanceState>(entry.state.load(kRelaxed));
}

int FindEntry(const StateView& view, std::string_view url, uint32_t dp_rank) {
  for (uint32_t i = 0; i < view.s.num_instances; ++i) {
    const InstanceEntry& entry = view.instance(static_cast<int>(i));
    if (StateOf(entry) != InstanceState::kUnused && entry.dp_rank == dp_rank &&
        url == std::string_view(entry.url.data(), strnlen(entry.url.data(), entry.url.size()))) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int FindUnused(const StateView& view) {
  for (uint32_t i = 0; i < view.options.max_instances; ++i) {
    if (StateOf(view.instance(static_cast<int>(i))) == InstanceState::kUnused) return static_cast<int>(i);
  }
  return -1;
}

void SetFields(InstanceEntry& entry, const InstanceConfig& config) {
  if (entry.revision == 0 || CopyOf(entry, 0).config != config) ++entry.revision;
  entry.role = static_cast<uint8_t>(config.role);
  entry.dp_rank = config.dp_rank;
  entry.dp_ranks = config.dp_ranks;
  entry.group = config.group;
  entry.pod = config.pod;
  entry.model_class = config.model_class;
  entry.block_size = config.block_size;
  entry.weight = config.weight;
  entry.caps = config.caps;
  entry.batch_tokens = std::max<uint32_t>(config.batch_tokens, 1);
  entry.source = config.source;
  entry.source_key = config.source_key;
  entry.bootstrap_port = config.bootstrap_port;
  entry.drain = config.drain ? 1 : 0;
}

// State of an entry whose index is ready.
InstanceState ReadyState(const InstanceEntry& entry) {
  return entry.drain != 0 ? InstanceState::kDraining : InstanceState::kEnabled;
}

Status CheckConfig(const InstanceConfig& config) {
  if (config.url.empty() || config.url.size() >= kUrlBytes)
    return InvalidArgument("the URL of an instance has 1 to {} bytes, not {}", kUrlBytes - 1,
                           config.url.size());
  if (config.block_size == 0 || config.block_size > 65536)
    return InvalidArgument("{}: a block has 1 to 65536 tokens, not {}", config.url, config.block_size);
  if (!(config.weight > 0 && config.weight < 1e6))
    return InvalidArgument("{}: the weight must be above 0 and below 1000000, not {}", config.url,
                           config.weight);
  if (config.model_class >= kModelClasses)
    return InvalidArgument("{}: the model class must be below {}, not {}", config.url, kModelClasses,
                           config.model_class);
  return OkStatus();
}

// Marks the entries that `configs` name.
std::vector<bool> NamedOf(const StateView& view, std::span<const InstanceConfig> configs) {
  std::vector<bool> named(view.options.max_instances);
  for (const InstanceConfig& config : configs) {
    if (const int id = FindEntry(view, config.url, config.dp_rank); id >= 0)
      named[static_cast<size_t>(id)] = true;
  }
  return named;
}

Status CheckRoom(const StateView& view, std::span<const InstanceConfig> configs,
                 const std::vector<bool>& named) {
  uint32_t unused = 0, fresh = 0;
  for (uint32_t i = 0; i < view.options.max_instances; ++i) {
    const InstanceEntry& entry = view.instance(static_cast<int>(i));
    unused += StateOf(entry) == InstanceState::kUnused || (!named[i] && entry.load.references == 0);
  }
  for (const InstanceConfig& config : configs) fresh += FindEntry(view, config.url, config.dp_rank) < 0;
  if (fresh > unused) {
    return ResourceExhausted(
        "{} instances are new, and {} of the zone's {} entries are free: enlarge the zone", fresh, unused,
        view.options.max_instances);
  }
  return OkStatus();
}

}  // namespace

Status State::CheckCapacity(std::span<const InstanceConfig> configs) const {
  for (const InstanceConfig& config : configs) RETURN_IF_ERROR(CheckConfig(config));
  const StateView view(zone_);
  const Locked lock(zone_);
  return CheckRoom(view, configs, NamedOf(view, configs));
}

Lease& State::lease() const { return zone_.state().lease; }
int State::max_instances() const { return static_cast<int>(zone_.options().max_instances); }

StatusOr<Configured> State::Configure(std::span<const InstanceConfig> configs, Nanos now) {
  for (size_t i = 0; i < configs.size(); ++i) {
    RETURN_IF_ERROR(CheckConfig(configs[i]));
    for (size_t j = 0; j < i; ++j) {
      if (configs[i].url == configs[j].url && configs[i].dp_rank == configs[j].dp_rank)
        return InvalidArgument("the instance {} with DP rank {} is configured twice", configs[i].url,
                               configs[i].dp_rank);
    }
  }
  const StateView view(zone_);
  Configured result;
  std::vector<int> used_before;
  {
    const Locked lock(zone_);
    const std::vector<bool> named = NamedOf(view, configs);
    RETURN_IF_ERROR(CheckRoom(view, configs, named));
    for (uint32_t i = 0; i < view.s.num_instances; ++i) {
      const int id = static_cast<int>(i);
      InstanceEntry& entry = view.instance(id);
      if (named[i] || StateOf(entry) == InstanceState::kUnused) continue;
      if (StateOf(entry) != InstanceState::kAbandoned) result.removed.push_back(id);
      entry.state.store(static_cast<uint8_t>(InstanceState::kAbandoned), std::memory_order_release);
      FreeIfUnreferenced(view, id);
    }
    for (const InstanceConfig& config : configs) {
      int id = FindEntry(view, config.url, config.dp_rank);
      if (id >= 0) {
        InstanceEntry& entry = view.instance(id);
        // The block size is part of every key: with another one the known blocks are useless.
        if (entry.block_size != config.block_size) used_before.push_back(id);
        const bool drained = entry.drain != 0;
        SetFields(entry, config);
        if (entry.starting != 0) {  // the process that added it may have died
          used_before.push_back(id);
          result.added.push_back(id);
          continue;
        }
        // A state that SetInstanceState gave stays, unless the option has changed.
        if (StateOf(entry) == InstanceState::kAbandoned || drained != config.drain)
          entry.state.store(static_cast<uint8_t>(ReadyState(entry)), std::memory_order_release);
        result.kept.push_back(id);
        continue;
      }
      id = FindUnused(view);
      InstanceEntry& entry = view.instance(id);
      const uint32_t generation = entry.generation + 1;
      std::memset(static_cast<void*>(&entry), 0, sizeof entry);
      entry.generation = generation;
      SetFields(entry, config);
      entry.healthy = 1;
      entry.starting = 1;
      std::memcpy(entry.url.data(), config.url.data(), config.url.size());
      entry.last_prefill_done = now;
      // Until its index is clear, the entry exists and gets no requests.
      entry.state.store(static_cast<uint8_t>(InstanceState::kDisabled), std::memory_order_release);
      view.s.num_instances = std::max(view.s.num_instances, static_cast<uint32_t>(id) + 1);
      if (generation > 1) used_before.push_back(id);
      result.added.push_back(id);
    }
  }
  if (!used_before.empty()) {
    // A writer of the engine that had the entry before has ended its batch, and applies no other.
    const WritersLock writers(zone_);
    for (const int id : used_before) {
      BlockIndex(zone_).Clear(id);
      InstanceEntry& entry = view.instance(id);
      if (entry.index_state.load() == static_cast<uint8_t>(IndexState::kNone)) continue;
      // The engine still has the blocks.
      entry.history_lost.store(1);
      if (entry.index_state.load() == static_cast<uint8_t>(IndexState::kExact)) {
        entry.index_state.store(static_cast<uint8_t>(IndexState::kDegraded));
      }
    }
  }
  const Locked lock(zone_);
  for (const int id : result.added) {
    InstanceEntry& entry = view.instance(id);
    if (std::exchange(entry.starting, uint8_t{0}) == 0) continue;  // another call has enabled it
    entry.state.store(static_cast<uint8_t>(ReadyState(entry)), std::memory_order_release);
  }
  return result;
}

std::optional<InstanceRecord> State::Instance(int id) const {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (!view.InstanceUsed(id)) return std::nullopt;
  return CopyOf(view.instance(id), id);
}

std::optional<InstanceVersion> State::Version(int id) const {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (!view.InstanceUsed(id)) return std::nullopt;
  const InstanceEntry& entry = view.instance(id);
  return InstanceVersion{.generation = entry.generation, .revision = entry.revision};
}

std::vector<InstanceRecord> State::Instances() const {
  const StateView view(zone_);
  const Locked lock(zone_);
  std::vector<InstanceRecord> records;
  for (uint32_t i = 0; i < view.s.num_instances; ++i) {
    if (view.InstanceUsed(static_cast<int>(i)))
      records.push_back(CopyOf(view.instance(static_cast<int>(i)), static_cast<int>(i)));
  }
  return records;
}

int State::FindInstance(std::string_view url, uint32_t dp_rank) const {
  const StateView view(zone_);
  const Locked lock(zone_);
  return FindEntry(view, url, dp_rank);
}

Status State::SetInstanceState(int id, InstanceState state) {
  if (state != InstanceState::kEnabled && state != InstanceState::kDraining &&
      state != InstanceState::kDisabled)
    return InvalidArgument("an instance can be enabled, draining or disabled, not {}",
                           InstanceStateName(state));
  const StateView view(zone_);
  const Locked lock(zone_);
  if (!view.InstanceUsed(id)) return NotFound("there is no instance {}", id);
  if (StateOf(view.instance(id)) == InstanceState::kAbandoned)
    return absl::FailedPreconditionError(fmt::format("instance {} is no longer configured", id));
  view.instance(id).state.store(static_cast<uint8_t>(state), std::memory_order_release);
  return OkStatus();
}

void State::SetHealthy(int id, bool healthy) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (!view.InstanceUsed(id)) return;
  view.instance(id).healthy = healthy ? 1 : 0;
}

void State::SetReportedBlocks(int id, uint64_t blocks) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (view.InstanceUsed(id)) view.instance(id).reported_kv_blocks = blocks;
}

void State::RecordSuccess(int id) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (!view.InstanceUsed(id)) return;
  view.instance(id).failures = 0;
  view.instance(id).closed_until = 0;
}

void State::RecordFailure(int id, Nanos now, const BreakerOptions& options) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (!view.InstanceUsed(id)) return;
  InstanceEntry& entry = view.instance(id);
  // Requests that were sent before the breaker opened fail by the same cause: they do not count again.
  if (entry.closed_until > now) return;
  ++entry.failures;
  if (options.failures == 0 || entry.failures < options.failures) return;
  // The last instance that can serve stays: its failures show what is wrong, and a closed pool would not.
  bool other = false;
  for (uint32_t i = 0; i < view.s.num_instances && !other; ++i) {
    const InstanceEntry& candidate = view.instance(static_cast<int>(i));
    const bool same_role =
        candidate.role == entry.role || candidate.role == static_cast<uint8_t>(Role::kBoth);
    other = static_cast<int>(i) != id && StateOf(candidate) == InstanceState::kEnabled &&
            candidate.healthy != 0 && candidate.closed_until <= now && same_role;
  }
  if (!other) {
    entry.failures = options.failures - 1;  // the next one decides again
    return;
  }
  const uint32_t doublings = std::min<uint32_t>(entry.failures - options.failures, 30);
  const bool below = options.open <= options.max_open >> doublings;  // the product does not overflow
  entry.closed_until = now + (below ? options.open << doublings : options.max_open);
}

StatusOr<int> State::RegisterWorker(int32_t pid) {
  const StateView view(zone_);
  const Locked lock(zone_);
  for (uint32_t i = 0; i < view.options.max_workers; ++i) {
    WorkerEntry& worker = view.worker(static_cast<int>(i));
    if (worker.pid.load(kRelaxed) != 0) continue;
    for (uint32_t w = 0; w < view.s.bitmap_words; ++w)
      view.scheduled(static_cast<int>(i))[w].store(0, kRelaxed);
    worker.requests = 0;
    worker.pid.store(pid, std::memory_order_release);
    view.s.num_workers = std::max(view.s.num_workers, i + 1);
    return static_cast<int>(i);
  }
  return ResourceExhausted("the zone has {} workers already: enlarge it", view.options.max_workers);
}

namespace {

int FinishAllOf(const StateView& view, int worker, Nanos now) {
  int finished = 0;
  for (uint32_t i = 0; i < view.options.max_requests; ++i) {
    const RequestSlot& slot = view.slot(i);
    if (slot.used.load(kRelaxed) == 0 || slot.worker != worker) continue;
    FinishSlot(view, i, Outcome::kLost, now);
    ++finished;
  }
  view.worker(worker).pid.store(0, std::memory_order_release);
  return finished;
}

}  // namespace

void State::UnregisterWorker(int worker, Nanos now) {
  const StateView view(zone_);
  const Locked lock(zone_);
  if (worker < 0 || worker >= static_cast<int>(view.s.num_workers)) return;
  FinishAllOf(view, worker, now);
}

int State::ReclaimDeadWorkers(Nanos now) {
  const StateView view(zone_);
  int freed = 0;
  for (uint32_t i = 0; i < view.options.max_workers; ++i) {
    const int32_t pid = view.worker(static_cast<int>(i)).pid.load(std::memory_order_acquire);
    if (pid == 0 || ProcessLives(pid)) continue;
    const Locked lock(zone_);
    if (view.worker(static_cast<int>(i)).pid.load(kRelaxed) == pid)
      freed += FinishAllOf(view, static_cast<int>(i), now);
  }
  if (freed > 0) {
    const Locked lock(zone_);
    view.s.reclaimed += static_cast<uint64_t>(freed);
  }
  return freed;
}

}  // namespace moesaic::proxy
