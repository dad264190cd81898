#include "proxy/gateway/named_engines.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "proxy/gateway/engine_line.h"
#include "proxy/gateway/gateway.h"

namespace moesaic::proxy {
namespace {

// Names are looked up again when the answer expires, within these bounds.
constexpr Nanos kMinLookupDelay = kSecond, kMaxLookupDelay = 3600 * kSecond;
constexpr Nanos kFailedLookupDelay = 2 * kSecond;

}  // namespace

NamedEngines::NamedEngines(Gateway& gateway, std::vector<EngineSettings> ranks, std::function<void()> changed)
    : gateway_(gateway), ranks_(std::move(ranks)), changed_(std::move(changed)), timer_(gateway.timers()) {
  StartLookup();
}

NamedEngines::~NamedEngines() {
  if (lookup_ != nullptr) gateway_.transport().CancelResolve(lookup_);
}

void NamedEngines::StartLookup() {
  lookup_ = gateway_.transport().Resolve(name(), *this);
  if (lookup_ == nullptr) Fail("nginx has no resolver: name servers are set by 'resolver' in its http block");
}

void NamedEngines::Fail(const std::string& fault) {
  gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
  if (!std::exchange(fault_reported_, true))
    gateway_.transport().Log(true, fmt::format("cannot look up '{}': {}; it is tried again", name(), fault));
  timer_.At(gateway_.now() + kFailedLookupDelay, [this] { StartLookup(); });
}

void NamedEngines::OnAddresses(const Addresses& addresses) {
  lookup_ = nullptr;
  if (addresses.verdict == Addresses::Verdict::kFailed) return Fail(addresses.fault);
  if (std::exchange(fault_reported_, false))
    gateway_.transport().Log(false, fmt::format("the lookup of '{}' succeeds again", name()));
  // nginx answers from its cache until the second in which an answer expires has ended.
  timer_.At(gateway_.now() + std::clamp(addresses.valid + kSecond, kMinLookupDelay, kMaxLookupDelay),
            [this] { StartLookup(); });
  std::vector<std::string> found = addresses.sockaddrs;
  std::sort(found.begin(), found.end());
  if (engines_ && found == addresses_) return;
  // One more than the zone has room for: Discovery reports it.
  const auto most = static_cast<size_t>(gateway_.state().max_instances()) + 1;
  std::vector<EngineSettings> engines;
  for (const std::string& address : found) {
    for (const EngineSettings& rank : ranks_) {
      if (engines.size() < most) engines.push_back(AtAddress(rank, address));
    }
  }
  addresses_ = std::move(found);
  engines_ = std::move(engines);
  changed_();
}

void NamedEngines::OnLost(std::string_view what) {
  lookup_ = nullptr;
  Fail(std::string(what));
}

}  // namespace moesaic::proxy
