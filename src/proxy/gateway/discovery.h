// Keeps the engines of the shared memory equal to those of the configuration and of its sources: names that
// are looked up, and etcd. The master does it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proxy/gateway/settings.h"
#include "proxy/gateway/timers.h"

namespace moesaic::proxy {

class EtcdWatch;
class Gateway;
class NamedEngines;

/// Returns the engines of the configuration, and those that its sources named before it was loaded.
std::vector<InstanceConfig> WithDiscovered(const PoolSettings& settings, const State& state);

class Discovery {
 public:
  /// Begins to follow the sources. Destruction ends it; the engines stay.
  explicit Discovery(Gateway& gateway);
  ~Discovery();

 private:
  struct Named {
    uint32_t source;
    std::unique_ptr<NamedEngines> engines;
  };

  void Changed();
  void Apply();
  void ReportFull(const std::string& fault);

  Gateway& gateway_;
  std::vector<Named> named_;
  std::vector<std::unique_ptr<EtcdWatch>> etcd_;
  Timer timer_;
  bool full_reported_ = false;  // whether the lack of room was logged
};

}  // namespace moesaic::proxy
