#include "server/live_requests.h"

#include <utility>

namespace moesaic::server {

std::shared_ptr<LiveRequest> LiveRequests::Add(std::string id, int64_t prompt_tokens) {
  auto live = std::make_shared<LiveRequest>();
  live->id = std::move(id);
  live->prompt_tokens = prompt_tokens;
  const std::lock_guard lock(mutex_);
  all_.remove_if([](const auto& weak) { return weak.expired(); });
  all_.push_back(live);
  return live;
}

Json LiveRequests::List(size_t most) const {
  Json list = Json::array();
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  for (const auto& weak : all_) {
    const auto live = weak.lock();
    if (live == nullptr) continue;
    if (list.size() == most) break;
    const int64_t output = live->output_tokens;
    list.push_back({{"id", live->id},
                    {"state", output > 0 ? "decode" : "waiting or prefill"},
                    {"prompt_tokens", live->prompt_tokens},
                    {"cached_tokens", live->cached_tokens.load()},
                    {"output_tokens", output},
                    {"age_seconds", std::chrono::duration<double>(now - live->since).count()}});
  }
  return list;
}

}  // namespace moesaic::server
