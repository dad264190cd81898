// Active health checks of a pool's engines, made by the master.
#pragma once

#include <memory>
#include <vector>

namespace moesaic::proxy {

class Gateway;

class EngineChecks {
 public:
  /// Begins to check. Destruction ends it.
  explicit EngineChecks(Gateway& gateway);
  ~EngineChecks();

 private:
  class Check;
  std::vector<std::unique_ptr<Check>> checks_;
};

}  // namespace moesaic::proxy
