// Lists the running choices for the operations page.
#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "server/json_fields.h"

namespace moesaic::server {

/// A running choice. Any thread may use it.
struct LiveRequest {
  std::string id;
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  int64_t prompt_tokens = 0;
  std::atomic<int64_t> cached_tokens{0};
  std::atomic<int64_t> output_tokens{0};
};

/// Any thread may call all methods. An entry is listed as long as its owner holds it.
class LiveRequests {
 public:
  std::shared_ptr<LiveRequest> Add(std::string id, int64_t prompt_tokens);
  /// Returns the oldest `most` entries as {"id", "state", "prompt_tokens", ...}.
  Json List(size_t most) const;

 private:
  mutable std::mutex mutex_;
  std::list<std::weak_ptr<LiveRequest>> all_;
};

}  // namespace moesaic::server
