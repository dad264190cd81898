// Ends the answers that are still running when the drain deadline passes.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

namespace moesaic::server {

/// Any thread.
class AnswerStops {
 public:
  /// Keeps `stop` while `owner` lives. After StopAll(), runs it at once.
  void Add(std::weak_ptr<void> owner, std::function<void()> stop) {
    {
      const std::lock_guard lock(mutex_);
      stops_.remove_if([](const auto& entry) { return entry.first.expired(); });
      if (!stopped_) {
        stops_.emplace_back(std::move(owner), std::move(stop));
        return;
      }
    }
    stop();
  }

  void StopAll() {
    std::list<std::pair<std::weak_ptr<void>, std::function<void()>>> stops;
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      stops.swap(stops_);
    }
    for (const auto& [owner, stop] : stops) stop();
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<std::weak_ptr<void>, std::function<void()>>> stops_;
  bool stopped_ = false;
};

}  // namespace moesaic::server
