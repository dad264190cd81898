// The engines of one name: one for each of its addresses, which are looked up again when they expire.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/gateway/settings.h"
#include "proxy/gateway/timers.h"
#include "proxy/gateway/transport.h"

namespace moesaic::proxy {

class Gateway;

class NamedEngines : public Lookup {
 public:
  /// `ranks`: the engine of the name, once for each data-parallel rank. `changed` is called when the engines
  /// change; it may not destroy this object.
  NamedEngines(Gateway& gateway, std::vector<EngineSettings> ranks, std::function<void()> changed);
  ~NamedEngines() override;
  NamedEngines(const NamedEngines&) = delete;
  NamedEngines& operator=(const NamedEngines&) = delete;

  /// Null before the first answer. While name servers fail, the engines of the last answer stay.
  const std::vector<EngineSettings>* engines() const { return engines_ ? &*engines_ : nullptr; }
  const std::string& name() const { return ranks_.front().host_name; }

  void OnAddresses(const Addresses& addresses) override;
  void OnLost(std::string_view what) override;

 private:
  void StartLookup();
  void Fail(const std::string& fault);

  Gateway& gateway_;
  const std::vector<EngineSettings> ranks_;
  const std::function<void()> changed_;
  Timer timer_;
  void* lookup_ = nullptr;
  std::vector<std::string> addresses_;  // sorted
  std::optional<std::vector<EngineSettings>> engines_;
  bool fault_reported_ = false;
};

}  // namespace moesaic::proxy
