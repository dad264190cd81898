#include "text/grammar_pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "text/grammar_cache.h"

namespace moesaic::text {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kWatch{20};

StatusOr<std::vector<Grammar>> Copies(const StatusOr<Grammar>& grammar, int count) {
  RETURN_IF_ERROR(grammar.status());
  std::vector<Grammar> copies;
  for (int i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(Grammar copy, grammar->Fork());
    copies.push_back(std::move(copy));
  }
  return copies;
}

milliseconds CpuTime(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return milliseconds(time.tv_sec * 1000 + time.tv_nsec / 1'000'000);
}

// One queued or running compilation, shared by all jobs with its source.
struct Compilation {
  std::string key;
  GrammarKind kind;
  std::string source;
  std::string client;
  std::vector<std::shared_ptr<GrammarWaiter>> waiters;
  bool running = false;
  bool overdue = false;
  const Grammar* grammar = nullptr;  // set while its first mask is computed
  clockid_t clock = {};              // CPU clock of the thread that runs it
  milliseconds started{};
};

}  // namespace

struct GrammarWaiter {
  std::weak_ptr<GrammarPool::Impl> pool;
  std::shared_ptr<Compilation> compilation;
  int copies = 1;
  GrammarPool::Done done;
};

class GrammarPool::Impl : public std::enable_shared_from_this<GrammarPool::Impl> {
 public:
  Impl(GrammarCompiler compiler, const GrammarPoolOptions& options)
      : compiler_(std::move(compiler)), options_(options), cache_(options.cache_bytes) {
    for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Work(); });
    threads_.emplace_back([this] { Watch(); });
  }

  StatusOr<Ticket> Start(Job job, Done done) {
    RETURN_IF_ERROR(compiler_.CheckSize(job.kind, job.source));
    const std::string key = std::to_string(static_cast<int>(job.kind)) + job.source;
    Ticket ticket;
    GrammarCache::Value cached;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_)
        return absl::UnavailableError("grammar compilation has stopped: the server is shutting down");
      cached = cache_.Find(key);
      if (cached == nullptr) {
        ASSIGN_OR_RETURN(const std::shared_ptr<Compilation> compilation, FindOrQueue(job, key));
        ticket.waiter_ = std::make_shared<GrammarWaiter>(
            GrammarWaiter{weak_from_this(), compilation, job.copies, std::move(done)});
        compilation->waiters.push_back(ticket.waiter_);
      }
    }
    if (cached != nullptr) done(Copies(*cached, job.copies));
    return ticket;
  }

  void Leave(const std::shared_ptr<GrammarWaiter>& waiter) {
    const std::lock_guard lock(mutex_);
    Compilation& compilation = *waiter->compilation;
    if (std::erase(compilation.waiters, waiter) == 0 || !compilation.waiters.empty()) return;
    if (compilation.running) {
      if (compilation.grammar != nullptr) compilation.grammar->Cancel();
    } else if (const auto queue = queues_.find(compilation.client); queue != queues_.end()) {
      std::erase(queue->second, waiter->compilation);
      if (queue->second.empty()) queues_.erase(queue);
    }
    by_key_.erase(compilation.key);
  }

  void Stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      for (const auto& compilation : running_) {
        if (compilation->grammar != nullptr) compilation->grammar->Cancel();
      }
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    std::vector<GrammarPool::Done> dropped;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    for (auto& [client, queue] : queues_) {
      for (const auto& compilation : queue) {
        for (const auto& waiter : compilation->waiters) dropped.push_back(std::move(waiter->done));
        compilation->waiters.clear();
      }
    }
    queues_.clear();
    by_key_.clear();
  }

  Stats stats() const {
    const std::lock_guard lock(mutex_);
    return {.queued = Queued(),
            .running = static_cast<int>(running_.size()),
            .cached = cache_.size(),
            .cached_bytes = cache_.bytes()};
  }

 private:
  int Queued() const {
    size_t queued = 0;
    for (const auto& [client, queue] : queues_) queued += queue.size();
    return static_cast<int>(queued);
  }

  StatusOr<std::shared_ptr<Compilation>> FindOrQueue(Job& job, const std::string& key) {
    if (const auto found = by_key_.find(key); found != by_key_.end()) return found->second;
    const auto own = queues_.find(job.client);
    const int of_client = own == queues_.end() ? 0 : static_cast<int>(own->second.size());
    if (of_client >= options_.max_queued_per_client || Queued() >= options_.max_queued) {
      return ResourceExhausted("too many grammars are queued for compilation: {}, of this client {}",
                               Queued(), of_client);
    }
    auto compilation = std::make_shared<Compilation>();
    compilation->key = key;
    compilation->kind = job.kind;
    compilation->source = std::move(job.source);
    compilation->client = job.client;
    queues_[job.client].push_back(compilation);
    by_key_[key] = compilation;
    changed_.notify_all();
    return compilation;
  }

  // Returns the next compilation of the client after the last one served.
  std::shared_ptr<Compilation> TakeNext() {
    auto queue = queues_.upper_bound(last_client_);
    if (queue == queues_.end()) queue = queues_.begin();
    std::shared_ptr<Compilation> next = std::move(queue->second.front());
    queue->second.pop_front();
    last_client_ = queue->first;
    if (queue->second.empty()) queues_.erase(queue);
    return next;
  }

  void Work() {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), options_.niceness);
    clockid_t clock{};
    pthread_getcpuclockid(pthread_self(), &clock);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !queues_.empty(); });
      if (stopping_) return;
      const std::shared_ptr<Compilation> compilation = TakeNext();
      compilation->running = true;
      compilation->clock = clock;
      compilation->started = CpuTime(clock);
      running_.push_back(compilation);
      changed_.notify_all();
      lock.unlock();
      auto value = std::make_shared<const StatusOr<Grammar>>(Compile(*compilation));
      lock.lock();
      std::erase(running_, compilation);
      const bool dropped = compilation->waiters.empty();
      if (!dropped) by_key_.erase(compilation->key);
      if (!dropped && !stopping_) cache_.Insert(compilation->key, value);
      auto waiters = std::exchange(compilation->waiters, {});
      lock.unlock();
      for (const auto& waiter : waiters) {
        // `done` may own a ticket of this waiter, so the waiter must not own `done`.
        const GrammarPool::Done done = std::exchange(waiter->done, nullptr);
        done(Copies(*value, waiter->copies));
      }
      waiters.clear();
      value.reset();
      lock.lock();
    }
  }

  StatusOr<Grammar> Compile(Compilation& compilation) {
    StatusOr<Grammar> grammar = compiler_.Compile(compilation.kind, compilation.source);
    if (!grammar.ok()) return grammar;
    {
      const std::lock_guard lock(mutex_);
      if (compilation.overdue) return Overdue();
      if (stopping_ || compilation.waiters.empty()) return absl::CancelledError("all waiters have cancelled");
      compilation.grammar = &*grammar;
    }
    const Status status = grammar->ComputeFirstMask();
    const std::lock_guard lock(mutex_);
    compilation.grammar = nullptr;
    if (compilation.overdue) return Overdue();
    if (!status.ok()) return status;
    return grammar;
  }

  Status Overdue() const {
    return InvalidArgument("the grammar costs too much: it takes more than {} ms to compile",
                           options_.max_time.count());
  }

  // Interrupts compilations that exceed the time limit.
  void Watch() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !running_.empty(); });
      if (stopping_) return;
      for (const auto& compilation : running_) {
        if (CpuTime(compilation->clock) - compilation->started <= options_.max_time) continue;
        compilation->overdue = true;
        if (compilation->grammar != nullptr) compilation->grammar->Cancel();
      }
      changed_.wait_for(lock, kWatch, [this] { return stopping_; });
    }
  }

  const GrammarCompiler compiler_;
  const GrammarPoolOptions options_;

  mutable std::mutex mutex_;  // guards all members below
  std::condition_variable changed_;
  GrammarCache cache_;
  std::map<std::string, std::deque<std::shared_ptr<Compilation>>> queues_;  // by client; no queue is empty
  std::map<std::string, std::shared_ptr<Compilation>> by_key_;              // queued and running
  std::vector<std::shared_ptr<Compilation>> running_;
  std::string last_client_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

GrammarPool::Ticket::~Ticket() {
  if (waiter_ == nullptr) return;
  if (const auto pool = waiter_->pool.lock()) pool->Leave(waiter_);
}
GrammarPool::Ticket::Ticket(Ticket&&) noexcept = default;
GrammarPool::Ticket& GrammarPool::Ticket::operator=(Ticket&& other) noexcept {
  std::swap(waiter_, other.waiter_);
  return *this;
}

GrammarPool::GrammarPool(GrammarCompiler compiler, const GrammarPoolOptions& options)
    : impl_(std::make_shared<Impl>(std::move(compiler), options)) {}
GrammarPool::~GrammarPool() { Stop(); }
StatusOr<GrammarPool::Ticket> GrammarPool::Start(Job job, Done done) {
  return impl_->Start(std::move(job), std::move(done));
}
void GrammarPool::Stop() { impl_->Stop(); }
GrammarPool::Stats GrammarPool::stats() const { return impl_->stats(); }

}  // namespace moesaic::text
