// Active health checks of a pool's engines, made by the master.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "proxy/gateway/settings.h"

namespace moesaic::proxy {

class Gateway;

/// Blocks of the pool of an engine's data-parallel rank in its metrics; 0: they have none.
uint64_t ReportedBlocks(std::string_view metrics, uint32_t rank);

class EngineChecks {
 public:
  explicit EngineChecks(Gateway& gateway);
  ~EngineChecks();

  /// Checks these engines from now on. Known ones keep the time of their next check.
  void Follow(const std::vector<EngineSettings>& engines);

 private:
  class Check;
  Gateway& gateway_;
  std::vector<std::unique_ptr<Check>> checks_;
};

}  // namespace moesaic::proxy
