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

class Discovery;
class EngineChecks;
class Gateway;
class KvFeeds;

/// Part of the memory for bodies of requests. Flows and exchanges that outlive them share it.
class BodyHold {
 public:
  BodyHold(size_t& used, size_t bytes) : used_(used), bytes_(bytes) { used_ += bytes_; }
  ~BodyHold() { used_ -= bytes_; }
  BodyHold(const BodyHold&) = delete;
  BodyHold& operator=(const BodyHold&) = delete;

 private:
  size_t& used_;
  size_t bytes_;
};

/// Resources that an exchange keeps after the end of its request.
struct Drainage {
  std::shared_ptr<BodyHold> body;
  RequestId id;  ///< finished with `outcome` at the end of the exchange; none: the request was finished
  Outcome outcome = Outcome::kAborted;
};

/// KV blocks that P holds for a request whose client left, or that no decode engine took: a decode engine
/// fetches them for one token, so that P frees them.
struct KvRelease {
  Endpoint endpoint = Endpoint::kOther;
  std::string target;
  SharedBody body;
  std::vector<Header> headers;     ///< of the request, without those that depend on the engine
  std::shared_ptr<BodyHold> hold;  ///< of `body`
  int prefill = -1;                ///< the instance that holds the blocks
  bool strip = true;               ///< RequestBody::has_kv_transfer
};

/// Reads the rest of an exchange whose client left.
class DrainHandler : public Exchange::Handler {
 public:
  /// `until_first_byte`: cancels the exchange at the first byte of its answer.
  explicit DrainHandler(Gateway& gateway, bool until_first_byte = false)
      : gateway_(gateway), until_first_byte_(until_first_byte) {}
  void OnHead(Exchange&) override {}
  void OnBody(Exchange& exchange, std::string_view bytes) override;
  void OnEnd(Exchange& exchange) override;
  void OnError(Exchange& exchange, const Status& status) override;

 protected:
  virtual void Read(std::string_view) {}
  virtual void Ended(Exchange&) {}
  virtual void Failed(Exchange&, const Status&) {}
  Gateway& gateway_;

 private:
  bool until_first_byte_;
};

/// One thread, that of the event loop. The exception is Flow::Prepare.
///
/// One worker, the master, holds the lease. It runs the scheduler, subscribes to KV events, checks the
/// engines' health, and follows the sources of engines. Other workers wake it after they changed a queue, and
/// it wakes the workers whose requests it placed. Workers watch each other's processes, so that they notice
/// the death of the master at once.
class Gateway {
 public:
  /// `renderer` may be null. `settings`, `board` and `renderer` outlive the gateway.
  Gateway(const PoolSettings& settings, Zone zone, Board& board, PromptRenderer* renderer,
          Transport& transport);
  ~Gateway();

  /// Registers this process as a worker. `wake` is the name by which the transports of other workers wake it
  /// and send messages to it.
  Status Start(int32_t pid, uint64_t wake);
  /// Called when the worker shall exit. Releases the lease; the worker finishes its requests. If all other
  /// workers shall exit, too, this one schedules.
  void Retire();
  /// Called when the worker exits.
  void Stop();

  Flow& NewFlow(Client& client);

  // Events.
  void OnTimer();
  void OnSoon();
  void OnWake();
  /// A message of a worker that uses another zone.
  void OnMessage(std::string_view message);
  /// The message of a decode engine that names its blocks (transfer ascend); returns the status of the
  /// answer.
  int Metaserver(std::string_view body);
  /// Returns whether the peer with this sockaddr may send such messages.
  bool MetaserverAllows(std::string_view sockaddr) const {
    return Contains(settings_.metaserver_allow, sockaddr);
  }

  int worker() const { return worker_; }
  uint64_t wake() const { return wake_; }
  int32_t pid() const { return pid_; }
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
  /// Returns the settings of an instance; null: no instance has this number. Settings of an instance that a
  /// later configuration added come from its record.
  const EngineSettings* Engine(int instance);
  /// Returns the engine for a request that is not scheduled: the least loaded one that decodes, in the group
  /// of instance `prefill` unless that is negative.
  int AnyEngine(int prefill = -1);
  /// Subscribes to the events of these engines and checks their health, from now on.
  void Follow(const std::vector<EngineSettings>& engines);
  void ScheduleSoon();
  /// Removes the blocks of cleared instances from the index, if there are any, in slices over the next turns.
  void SweepSoon();
  void Register(Flow& flow);
  void Unregister(RequestId id);
  /// Destroys the exchange when the current event has been handled.
  void DestroyLater(std::unique_ptr<Exchange> exchange);
  /// Lets the exchange run to its end although its client has left. `handler`: reads the rest; null: nothing
  /// does.
  void Drain(std::unique_ptr<Exchange> exchange, std::unique_ptr<DrainHandler> handler, Drainage kept);
  void ReleaseKv(const KvRelease& release, const std::string& params);
  /// Returns the id of P's engine that its bootstrap server reported recently; empty: none is known.
  std::string BootstrapId(int instance);
  void SetBootstrapId(int instance, std::string id);
  /// Takes part of the memory for bodies of requests. Null: it is used up.
  std::shared_ptr<BodyHold> TakeBody(size_t bytes);
  size_t body_bytes() const { return body_bytes_; }
  /// Counts a request that passes without scheduling. False: there are too many.
  bool TakePass();
  void ReturnPass() { --passing_; }
  /// Returns the text of an HTTP request up to its body.
  std::string HttpHead(const EngineSettings& engine, std::string_view method, std::string_view target,
                       const std::vector<Header>& headers, size_t body_bytes) const;
  ExchangeTimeouts timeouts() const;
  void Reap(Flow& flow);

 private:
  friend class DrainHandler;
  class Death;

  void Schedule();
  void TakeLease(LeaseToken lease);
  void DropLease(bool release);
  void TryAcquire(int32_t dead = 0);
  void CheckMaster();
  void WakeOthers();
  void EndDrain(Exchange& exchange);
  void DispatchScheduled();
  bool PassBlocks(RequestId id, const std::string& name, const std::string& text);
  void WatchWorkers();
  void ArmTimer();
  void Collect();

  const PoolSettings& settings_;
  Board& board_;
  size_t body_bytes_ = 0, passing_ = 0;
  PromptRenderer* renderer_;
  Transport& transport_;
  State state_;
  BlockIndex index_;
  KeyMaker keys_;
  Scheduler scheduler_;
  LeaseOptions lease_options_;
  LeaseToken lease_;
  Timers timers_;
  Timer run_, check_, sweep_;
  int32_t pid_ = 0;
  int worker_ = -1;
  uint64_t wake_ = 0;
  bool retiring_ = false, schedule_wanted_ = false, soon_ = false;
  std::unordered_map<Flow*, std::unique_ptr<Flow>> flows_;
  std::unordered_map<uint64_t, Flow*> by_id_;
  std::vector<Flow*> reap_;
  struct Drained {
    std::unique_ptr<Exchange> exchange;
    std::unique_ptr<DrainHandler> handler;
    Drainage kept;
  };
  std::vector<Drained> destroyed_;  // when the current event has been handled
  std::unordered_map<Exchange*, Drained> drains_;
  std::unordered_map<int32_t, std::unique_ptr<Death>> deaths_;
  struct Bootstrap {
    std::string id;
    uint32_t generation = 0;  // of the instance: another engine may get its number
    Nanos until = 0;
  };
  std::unordered_map<int, Bootstrap> bootstrap_ids_;
  struct KnownEngine {
    InstanceVersion version;
    const EngineSettings* settings = nullptr;       // of the configuration, or `own`
    std::unique_ptr<EngineSettings> own = nullptr;  // of an instance that was added or changed later
  };
  std::unordered_map<int, KnownEngine> engines_;  // by instance
  std::unique_ptr<KvFeeds> feeds_;
  std::unique_ptr<EngineChecks> checks_;
  std::unique_ptr<Discovery> discovery_;
  std::mt19937_64 random_;
};

}  // namespace moesaic::proxy
