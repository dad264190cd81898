// Subscriptions to the KV events of a pool's engines over ZeroMQ, held by the master.
#pragma once

#include <memory>
#include <vector>

namespace moesaic::proxy {

class Gateway;

class KvFeeds {
 public:
  /// Subscribes. Endpoints that cannot be used are reported in the error log. Destruction ends the subscriptions.
  explicit KvFeeds(Gateway& gateway);
  ~KvFeeds();

 private:
  class Feed;
  void* context_ = nullptr;
  std::vector<std::unique_ptr<Feed>> feeds_;
};

}  // namespace moesaic::proxy
