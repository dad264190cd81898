// Gateway: the proxy of one pool in one worker process.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "proxy/gateway/board.h"
#include "proxy/gateway/flow.h"
#include "proxy/gateway/settings.h"
#include "proxy/gateway/timers.h"
#include "proxy/gateway/transport.h"
#include "proxy/index/block_index.h"
#include "proxy/index/keys.h"
#include "proxy/schedule/scheduler.h"
#include "proxy/tokenize/prompt_renderer.h"

namespace moesaic::proxy {

class EngineChecks;
class KvFeeds;

/// One thread, that of the event loop. The exception is Flow::Tokenize.
///
/// One worker of all, the master, holds the lease: it runs the scheduler, subscribes to KV events and checks
/// the engines' health. The others wake it after they changed a queue, and it wakes the workers whose
/// requests it placed. Workers watch each other's processes, so that the death of the master is noticed at
/// once.
class Gateway {
 public:
  /// `renderer` may be null. `settings`, `board` and `renderer` outlive the gateway.
  Gateway(const PoolSettings& settings, Zone zone, Board& board, PromptRenderer* renderer,
          Transport& transport);
  ~Gateway();

  /// Registers this process as a worker.
  Status Start(int32_t pid);
  /// The worker is asked to exit: it gives up the lease and finishes its requests.
  void Retire();
  /// The worker exits now.
  void Stop();

  Flow& NewFlow(Client& client);

  // Events.
  void OnTimer();
  void OnSoon();
  void OnWake();
  /// A decode engine posted its blocks (transfer ascend); returns the status of the answer.
  int Metaserver(std::string_view body);

  int worker() const { return worker_; }
  bool idle() const { return flows_.empty() && drains_.empty(); }
  bool master() const { return static_cast<bool>(lease_); }
  LeaseToken lease() const { return lease_; }

  // --- For flows ---
  const PoolSettings& settings() const { return settings_; }
  State& state() { return state_; }
  BlockIndex& index() { return index_; }
  Scheduler& scheduler() { return scheduler_; }
  const KeyMaker& keys() const { return keys_; }
  Board& board() { return board_; }
  PromptRenderer* renderer() { return renderer_; }
  Transport& transport() { return transport_; }
  Timers& timers() { return timers_; }
  Nanos now() { return transport_.Now(); }
  std::mt19937_64& random() { return random_; }
  const EngineSettings* Engine(int instance) const;
  /// The engine for a request that is not scheduled: the least loaded one that decodes.
  int AnyEngine() const;
  void ScheduleSoon();
  void Register(Flow& flow);
  void Unregister(RequestId id);
  /// Destroys the exchange when the current event has been handled.
  void Bury(std::unique_ptr<Exchange> exchange);
  /// Lets the exchange run to its end; its answer is discarded.
  void Drain(std::unique_ptr<Exchange> exchange);
  /// Frees KV blocks that P holds for a request whose client left: a decode engine fetches them for one
  /// token. `text` is the client's body.
  void ReleaseKv(Endpoint endpoint, std::string_view text, const std::string& target,
                 const std::string& params);
  /// Lets P finish, and then frees its blocks.
  void DrainPrefill(std::unique_ptr<Exchange> exchange, Endpoint endpoint, std::string text,
                    std::string target);
  /// Lets D answer until its first byte, which shows that it has fetched the blocks of P, and cancels it.
  void DrainToFirstByte(std::unique_ptr<Exchange> exchange);
  /// Returns the engine id of P's bootstrap server if it is known.
  std::string* BootstrapId(int instance) { return &bootstrap_ids_[instance]; }
  std::string HttpRequest(const EngineSettings& engine, std::string_view method, std::string_view target,
                          const std::vector<Header>& headers, std::string_view body) const;
  ExchangeTimeouts timeouts() const;
  void Reap(Flow& flow);

 private:
  class Death;
  class DrainHandler;
  class PrefillDrain;

  void DrainWith(std::unique_ptr<Exchange> exchange, std::unique_ptr<Exchange::Handler> handler);
  void EndDrain(Exchange& exchange);
  void Schedule();
  void TakeLease(LeaseToken lease);
  void DropLease(bool release);
  void TryAcquire();
  void DispatchScheduled();
  void WatchWorkers();
  void ArmTimer();
  void Collect();

  const PoolSettings& settings_;
  Board& board_;
  PromptRenderer* renderer_;
  Transport& transport_;
  State state_;
  BlockIndex index_;
  KeyMaker keys_;
  Scheduler scheduler_;
  LeaseOptions lease_options_;
  LeaseToken lease_;
  Timers timers_;
  Timer run_, check_;
  int32_t pid_ = 0;
  int worker_ = -1;
  bool retiring_ = false, schedule_wanted_ = false, soon_ = false;
  std::unordered_map<Flow*, std::unique_ptr<Flow>> flows_;
  std::unordered_map<uint64_t, Flow*> by_id_;
  std::vector<Flow*> reap_;
  std::vector<std::unique_ptr<Exchange>> buried_;
  struct Drained {
    std::unique_ptr<Exchange> exchange;
    std::unique_ptr<Exchange::Handler> handler;
  };
  std::unordered_map<Exchange*, Drained> drains_;
  std::vector<std::unique_ptr<Exchange::Handler>> buried_handlers_;
  std::unordered_map<int32_t, std::unique_ptr<Death>> deaths_;
  std::unordered_map<int, std::string> bootstrap_ids_;
  std::vector<int> engine_of_instance_;
  std::unique_ptr<KvFeeds> feeds_;
  std::unique_ptr<EngineChecks> checks_;
  std::mt19937_64 random_;
};

}  // namespace moesaic::proxy
