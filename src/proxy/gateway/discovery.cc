#include "proxy/gateway/discovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "proxy/gateway/engine_line.h"
#include "proxy/gateway/etcd_watch.h"
#include "proxy/gateway/gateway.h"
#include "proxy/gateway/named_engines.h"

namespace moesaic::proxy {
namespace {

bool SameEngine(const InstanceConfig& a, const InstanceConfig& b) {
  return a.url == b.url && a.dp_rank == b.dp_rank;
}

constexpr Nanos kFullDelay = kSecond;  // until room is looked for again

// Adds engines that are not in the list yet: the configuration comes first. Stops at one more than `room`.
void AddNew(const std::vector<EngineSettings>& engines, uint32_t source, size_t room,
            std::vector<EngineSettings>* list) {
  for (const EngineSettings& engine : engines) {
    if (list->size() > room) return;
    const bool known = std::any_of(list->begin(), list->end(), [&engine](const EngineSettings& other) {
      return SameEngine(other.instance, engine.instance);
    });
    if (known) continue;
    list->push_back(engine);
    list->back().instance.source = source;
  }
}

bool IsEnabled(const InstanceRecord& record) {
  return record.state != InstanceState::kUnused && record.state != InstanceState::kAbandoned;
}

}  // namespace

std::vector<InstanceConfig> WithDiscovered(const PoolSettings& settings, const State& state) {
  std::vector<InstanceConfig> configs = settings.Instances();
  const std::vector<uint32_t> sources = settings.Sources();
  for (const InstanceRecord& record : state.Instances()) {
    if (!IsEnabled(record) ||
        std::find(sources.begin(), sources.end(), record.config.source) == sources.end())
      continue;
    const bool known = std::any_of(configs.begin(), configs.end(), [&record](const InstanceConfig& config) {
      return SameEngine(config, record.config);
    });
    if (!known) configs.push_back(record.config);
  }
  return configs;
}

Discovery::Discovery(Gateway& gateway) : gateway_(gateway), timer_(gateway.timers()) {
  const PoolSettings& settings = gateway.settings();
  const auto changed = [this] { Changed(); };
  for (auto engine = settings.named.begin(); engine != settings.named.end();) {
    const auto end = std::find_if(engine, settings.named.end(), [&engine](const EngineSettings& other) {
      return other.instance.url != engine->instance.url;
    });
    named_.push_back({.source = SourceNumber(engine->instance.url),
                      .engines = std::make_unique<NamedEngines>(
                          gateway, std::vector<EngineSettings>(engine, end), changed)});
    engine = end;
  }
  for (const EtcdSettings& etcd : settings.etcd)
    etcd_.push_back(std::make_unique<EtcdWatch>(gateway, etcd, changed));
  Apply();
}

Discovery::~Discovery() = default;

// Several changes of one moment are applied together.
void Discovery::Changed() {
  timer_.At(gateway_.now(), [this] { Apply(); });
}

void Discovery::ReportFull(const std::string& fault) {
  gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
  if (!std::exchange(full_reported_, true)) gateway_.transport().Log(true, fault);
}

void Discovery::Apply() {
  if (!gateway_.state().lease().Holds(gateway_.lease())) return;
  std::vector<EngineSettings> engines = gateway_.settings().engines;
  const auto room = static_cast<size_t>(gateway_.state().max_instances());
  // Engines of sources that have not answered stay, and those of keys without an answer.
  std::set<uint32_t> unknown;
  std::set<std::pair<uint32_t, uint32_t>> unknown_keys;
  for (const Named& named : named_) {
    if (const std::vector<EngineSettings>* found = named.engines->engines()) {
      AddNew(*found, named.source, room, &engines);
    } else {
      unknown.insert(named.source);
    }
  }
  for (const auto& etcd : etcd_) {
    std::vector<EngineSettings> found;
    const uint32_t source = SourceNumber(etcd->prefix());
    if (!etcd->Append(&found)) unknown.insert(source);
    for (const uint32_t key : etcd->UnknownKeys()) unknown_keys.emplace(source, key);
    AddNew(found, source, room, &engines);
  }
  const std::vector<InstanceRecord> records = gateway_.state().Instances();
  for (const InstanceRecord& record : records) {
    const InstanceConfig& config = record.config;
    if (!IsEnabled(record) ||
        (!unknown.contains(config.source) && !unknown_keys.contains({config.source, config.source_key})))
      continue;
    StatusOr<EngineSettings> kept = EngineOf(config);
    if (kept.ok()) AddNew({*std::move(kept)}, config.source, room, &engines);
  }
  const bool all = engines.size() <= room;
  if (!all) {
    engines.resize(room);
    ReportFull(fmt::format("there are more than max_engines {} engines: the others are left out", room));
  }

  std::vector<InstanceConfig> wanted;
  for (const EngineSettings& engine : engines) wanted.push_back(engine.instance);
  size_t same = 0, enabled = 0;
  for (const InstanceRecord& record : records) {
    enabled += IsEnabled(record);
    same += IsEnabled(record) && std::find(wanted.begin(), wanted.end(), record.config) != wanted.end();
  }
  if (same != wanted.size() || enabled != wanted.size()) {
    const StatusOr<Configured> done = gateway_.state().Configure(wanted, gateway_.now());
    if (done.ok()) {
      gateway_.transport().Log(false, fmt::format("{} engines: {} added, {} removed", wanted.size(),
                                                  done->added.size(), done->removed.size()));
      gateway_.ScheduleSoon();
    } else {
      // Entries of removed engines are free when their requests have ended.
      ReportFull(
          fmt::format("the engines stay as they are for now: {}; it is tried again", Message(done.status())));
      timer_.At(gateway_.now() + kFullDelay, [this] { Apply(); });
    }
    if (all && done.ok()) full_reported_ = false;
  }
  gateway_.Follow(engines);
}

}  // namespace moesaic::proxy
