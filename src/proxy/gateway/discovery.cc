#include "proxy/gateway/discovery.h"

#include <fmt/format.h>

#include <algorithm>
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

// Adds engines that are not in the list yet: the configuration comes first.
void AddNew(const std::vector<EngineSettings>& engines, uint32_t source, std::vector<EngineSettings>* list) {
  for (const EngineSettings& engine : engines) {
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
  if (!timer_.armed()) timer_.At(gateway_.now(), [this] { Apply(); });
}

void Discovery::Apply() {
  if (!gateway_.state().lease().Holds(gateway_.lease())) return;
  std::vector<EngineSettings> engines = gateway_.settings().engines;
  std::vector<uint32_t> unknown;  // sources that have not answered: their engines stay
  for (const Named& named : named_) {
    if (const std::vector<EngineSettings>* found = named.engines->engines()) {
      AddNew(*found, named.source, &engines);
    } else {
      unknown.push_back(named.source);
    }
  }
  for (const auto& etcd : etcd_) {
    std::vector<EngineSettings> found;
    const uint32_t source = SourceNumber(etcd->prefix());
    if (!etcd->Append(&found)) unknown.push_back(source);
    AddNew(found, source, &engines);
  }
  const std::vector<InstanceRecord> records = gateway_.state().Instances();
  for (const InstanceRecord& record : records) {
    if (!IsEnabled(record) ||
        std::find(unknown.begin(), unknown.end(), record.config.source) == unknown.end())
      continue;
    StatusOr<EngineSettings> kept = EngineOf(record.config);
    if (kept.ok()) AddNew({*std::move(kept)}, record.config.source, &engines);
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
    if (!done.ok()) {
      gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
      if (!std::exchange(full_, true))
        gateway_.transport().Log(true,
                                 fmt::format("the engines stay as they are: {}", Message(done.status())));
      return;
    }
    full_ = false;
    gateway_.transport().Log(false, fmt::format("{} engines: {} added, {} removed", wanted.size(),
                                                done->added.size(), done->removed.size()));
    gateway_.ScheduleSoon();
  }
  gateway_.Follow(engines);
}

}  // namespace moesaic::proxy
