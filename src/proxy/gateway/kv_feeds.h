// Subscriptions to the KV events of a pool's engines over ZeroMQ, held by the master.
#pragma once

#include <memory>
#include <vector>

#include "proxy/gateway/settings.h"

namespace moesaic::proxy {

class Gateway;

class KvFeeds {
 public:
  explicit KvFeeds(Gateway& gateway);
  ~KvFeeds();

  /// Subscribes to the events of these engines and ends other subscriptions. Endpoints that cannot be used
  /// are reported in the error log.
  void Follow(const std::vector<EngineSettings>& engines);

 private:
  class Feed;
  Gateway& gateway_;
  void* context_ = nullptr;
  std::vector<std::unique_ptr<Feed>> feeds_;
};

}  // namespace moesaic::proxy
