#include "engine/engine_thread.h"

#include <absl/container/flat_hash_map.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace moesaic::engine {

namespace {

constexpr std::chrono::milliseconds kRankCheck{500};  // between two searches for dead ranks of an idle engine

}  // namespace

class EngineThread::Impl {
 public:
  Impl(std::unique_ptr<Engine> engine, const EngineThreadOptions& options)
      : engine_(std::move(engine)),
        options_(options),
        stats_(engine_->stats()),
        thread_([this] { Loop(); }) {}

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      draining_ = stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  StatusOr<RequestId> Submit(Request request, Sink sink) {
    RETURN_IF_ERROR(engine_->Check(request));
    const std::lock_guard lock(mutex_);
    if (draining_) return absl::UnavailableError("the engine takes no new requests: it is shutting down");
    RETURN_IF_ERROR(CheckRoomLocked(request.client, 1));
    const RequestId id = ++last_id_;
    ++unfinished_;
    CountWaiting(request);
    inbox_.submitted.push_back({id, std::move(request), std::move(sink), Clock::now()});
    wake_.notify_one();
    return id;
  }

  Status CheckRoom(const std::string& client, int64_t count) const {
    const std::lock_guard lock(mutex_);
    return CheckRoomLocked(client, count);
  }

  void Cancel(RequestId id) {
    const std::lock_guard lock(mutex_);
    inbox_.cancelled.push_back(id);
    wake_.notify_one();
  }

  void ClearCache() {
    const std::lock_guard lock(mutex_);
    inbox_.clear_cache = true;
    wake_.notify_one();
  }

  EngineStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  std::shared_ptr<const SurvivalStats> survival() const {
    const std::lock_guard lock(mutex_);
    return stats_.survival;
  }

  bool idle() const {
    const std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }

  void Drain() {
    const std::lock_guard lock(mutex_);
    draining_ = true;
  }

  Status failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  const Engine& engine() const { return *engine_; }

 private:
  struct Submitted {
    RequestId id;
    Request request;
    Sink sink;
    Clock::time_point arrived;
  };
  struct Inbox {
    std::vector<Submitted> submitted;
    std::vector<RequestId> cancelled;
    bool clear_cache = false;
    bool empty() const { return submitted.empty() && cancelled.empty() && !clear_cache; }
  };
  struct Live {
    RequestId id;  // number that Submit returned
    Sink sink;
    Clock::time_point arrived;
  };

  void CountWaiting(const Request& request) {
    ++stats_.waiting;
    ++stats_.waiting_of[request.client];
  }

  // The rule for shared buffers of switches (Choudhury and Hahne, "Dynamic queue length thresholds for
  // shared-memory packet switches", 1998): no queue becomes longer than the free space.
  Status CheckRoomLocked(const std::string& client, int64_t count) const {
    const int64_t most = options_.max_queued, before_last = count - 1;
    if (before_last > 0 && 2 * before_last >= most) {
      return InvalidArgument("one client may have at most {} waiting sequences, half of the queue; found {}",
                             (most + 1) / 2, count);
    }
    const int64_t free = most - stats_.waiting;
    if (free < count) return ResourceExhausted("too many requests wait: {} of {}", stats_.waiting, most);
    const auto found = stats_.waiting_of.find(client);
    const int64_t own = found == stats_.waiting_of.end() ? 0 : found->second;
    if (own + before_last < free - before_last) return OkStatus();
    return ResourceExhausted(
        "too many requests of this client wait: {}{}, with {} of {} places free; "
        "one client may have at most as many as are free",
        own, count > 1 ? fmt::format(", and this one adds {}", count) : "", free, most);
  }

  void Loop() {
    // Unbound, it may be put on a core of the pool's other threads, and each step waits for both.
    engine_->BindCaller();
    for (;;) {
      Inbox inbox;
      bool stop;
      {
        std::unique_lock lock(mutex_);
        const auto has_work = [this] {
          return stopping_ || !inbox_.empty() || !engine_->idle() || engine_->saving();
        };
        while (options_.fails_for_good && !wake_.wait_for(lock, kRankCheck, has_work)) {
          lock.unlock();
          const Status dead = engine_->CheckRanks();
          std::shared_ptr<const SurvivalStats> survival = engine_->survival();
          lock.lock();
          if (failure_.ok()) failure_ = dead;
          stats_.survival = std::move(survival);
        }
        wake_.wait(lock, has_work);
        inbox = std::exchange(inbox_, {});
        stop = stopping_;
      }
      Take(std::move(inbox));
      if (stop) CancelAll();
      std::vector<TokenEvent> events;
      // A model that failed for good may take its time limit to fail again, while its users are destroyed.
      Status status = options_.fails_for_good ? failure() : OkStatus();
      const bool runs = status.ok();
      while (runs) {  // requests in flight end with their steps
        status = engine_->Step(&events);
        if (!stop || !status.ok() || engine_->idle()) break;
      }
      if (!status.ok()) Fail(status, &events);
      EngineStats stats = engine_->stats();
      {
        const std::lock_guard lock(mutex_);
        stats_ = std::move(stats);
        for (const Submitted& submitted : inbox_.submitted) CountWaiting(submitted.request);
      }
      Tell(events);
      if (!stop) continue;
      engine_->SaveCache(options_.stop_saving);
      return;
    }
  }

  void Take(Inbox inbox) {
    for (Submitted& submitted : inbox.submitted) {
      StatusOr<RequestId> added = engine_->Add(std::move(submitted.request));
      // Check accepted it, so the engine has an error, or the only replica that holds it has failed.
      if (!added.ok()) {
        const bool refused = added.status().code() == StatusCode::kInvalidArgument;
        spdlog::log(refused ? spdlog::level::warn : spdlog::level::err, "request {}: {}", submitted.id,
                    Message(added.status()));
        TokenEvent end;
        end.request = submitted.id;
        end.finish = FinishReason::kInternal;
        end.status = added.status();
        submitted.sink({&end, 1});
        CountEnds(1);
        continue;
      }
      spdlog::debug("request {}: queued as engine request {}", submitted.id, *added);
      engine_id_[submitted.id] = *added;
      live_[*added] = {submitted.id, std::move(submitted.sink), submitted.arrived};
    }
    for (const RequestId id : inbox.cancelled) {
      if (const auto it = engine_id_.find(id); it != engine_id_.end()) engine_->Cancel(it->second);
    }
    if (inbox.clear_cache) engine_->ClearCache();
  }

  void CancelAll() {
    for (const auto& [id, live] : live_) engine_->Cancel(id);
  }

  // A model that failed would fail again, so all requests end. `events` has the ends that the step reported
  // before it failed.
  void Fail(const Status& status, std::vector<TokenEvent>* events) {
    if (!live_.empty()) spdlog::error("step failed: {}; aborted {} requests", Message(status), live_.size());
    if (options_.fails_for_good) {
      const std::lock_guard lock(mutex_);
      if (failure_.ok()) failure_ = status;
    }
    CancelAll();
    std::vector<TokenEvent> ends;
    if (const Status stepped = engine_->Step(&ends); !stepped.ok()) spdlog::error("{}", Message(stepped));
    for (TokenEvent& end : ends) {
      if (end.finish == FinishReason::kCancelled) {
        end.finish = FinishReason::kError;
        end.status = status;
      }
      events->push_back(std::move(end));
    }
  }

  // An engine's step lists a request's events in order, but not next to each other.
  void Tell(std::vector<TokenEvent>& events) {
    std::stable_sort(events.begin(), events.end(),
                     [](const TokenEvent& a, const TokenEvent& b) { return a.request < b.request; });
    int ended = 0;
    for (size_t first = 0, last = 0; first < events.size(); first = last) {
      const RequestId engine_id = events[first].request;
      const auto it = live_.find(engine_id);
      while (last < events.size() && events[last].request == engine_id) {
        events[last].request = it->second.id;
        events[last].times.queued = it->second.arrived;
        ++last;
      }
      it->second.sink(std::span(events).subspan(first, last - first));
      if (events[last - 1].finish == FinishReason::kNone) continue;
      engine_id_.erase(it->second.id);
      live_.erase(it);
      ++ended;
    }
    CountEnds(ended);
  }

  void CountEnds(int ended) {
    const std::lock_guard lock(mutex_);
    unfinished_ -= ended;
  }

  const std::unique_ptr<Engine> engine_;  // used by the thread only, except for constants
  const EngineThreadOptions options_;
  absl::flat_hash_map<RequestId, Live> live_;            // used by the thread only, by the engine's id
  absl::flat_hash_map<RequestId, RequestId> engine_id_;  // used by the thread only

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable wake_;
  Inbox inbox_;
  EngineStats stats_;  // after the last step; later submissions are counted as waiting
  RequestId last_id_ = 0;
  int unfinished_ = 0;
  Status failure_;
  bool draining_ = false, stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

EngineThread::EngineThread(std::unique_ptr<Engine> engine, const EngineThreadOptions& options)
    : impl_(std::make_unique<Impl>(std::move(engine), options)) {}
EngineThread::~EngineThread() = default;
StatusOr<RequestId> EngineThread::Submit(Request request, Sink sink) {
  return impl_->Submit(std::move(request), std::move(sink));
}
Status EngineThread::CheckRoom(const std::string& client, int64_t count) const {
  return impl_->CheckRoom(client, count);
}
void EngineThread::Cancel(RequestId id) { impl_->Cancel(id); }
void EngineThread::ClearCache() { impl_->ClearCache(); }
std::shared_ptr<const SurvivalStats> EngineThread::survival() const { return impl_->survival(); }
EngineStats EngineThread::stats() const { return impl_->stats(); }
bool EngineThread::idle() const { return impl_->idle(); }
void EngineThread::Drain() { impl_->Drain(); }
Status EngineThread::failure() const { return impl_->failure(); }
const models::ModelInfo& EngineThread::model() const { return impl_->engine().model(); }
int EngineThread::max_context() const { return impl_->engine().max_context(); }

}  // namespace moesaic::engine
