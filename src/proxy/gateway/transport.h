// The event loop as the gateway sees it. nginx implements it in the module; tests implement it in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/gateway/settings.h"

namespace moesaic::proxy {

class Exchange;
class Flow;

struct Header {
  std::string name, value;
};

/// A body that a flow and its exchanges share.
using SharedBody = std::shared_ptr<const std::string>;

/// Handles a descriptor that becomes readable. Readiness is edge-triggered: the watcher reads everything.
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void OnReadable() = 0;
};

/// Answer of a name server.
struct Addresses {
  enum class Verdict {
    kFound,
    kNone,   ///< the name has no address
    kFailed  ///< it is not known whether it has one
  };
  Verdict verdict = Verdict::kFailed;
  std::vector<std::string> sockaddrs;  ///< of any port
  Nanos valid = 0;                     ///< time until the answer expires
  std::string fault;                   ///< of kFailed
};

/// Waits for the addresses of a name.
class Lookup {
 public:
  virtual ~Lookup() = default;
  virtual void OnAddresses(const Addresses& addresses) = 0;
  /// An exception ended the lookup, or left OnAddresses. Its handle is not valid any more.
  virtual void OnLost(std::string_view what) = 0;
};

/// The client of one request. Calls after End have no effect.
class Client {
 public:
  virtual ~Client() = default;
  virtual void SendHead(int status, std::span<const Header> headers) = 0;
  virtual void SendBody(std::string_view bytes) = 0;
  /// Ends the answer. `complete` false: closes the connection, so that the client notices the truncation.
  virtual void End(bool complete) = 0;
  /// Runs flow.Prepare() in a thread and flow.OnPrepared() in the event loop. False: no thread is available.
  virtual bool StartPrepare(Flow& flow) = 0;
};

/// All calls come from the event loop's thread. No method calls back before it returns.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual Nanos Now() = 0;

  struct Connected {
    void* connection = nullptr;  ///< null: there is no connection
    bool reused = false;         ///< an idle connection was taken
    bool refused =
        false;  ///< the connection failed at once; false with null: the process has no descriptor left
  };
  /// Opens a connection, or takes an idle one when `reuse`, and sends `head` and `body`, which stay valid
  /// until the exchange ends. Calls the exchange's On functions.
  virtual Connected Connect(Exchange& exchange, const EngineAddress& address, std::string_view head,
                            std::string_view body, bool reuse) = 0;
  /// The exchange does not use the connection any more. `keep`: it may serve another exchange.
  virtual void Release(void* connection, bool keep) = 0;
  /// Stops or resumes reading.
  virtual void Pause(void* connection, bool paused) = 0;

  /// Calls Gateway::OnTimer after `delay`; replaces the last call. Negative: none. `idle`: the timer does not
  /// keep a worker alive that is asked to exit.
  virtual void ArmTimer(Nanos delay, bool idle) = 0;
  /// Calls Gateway::OnSoon before the loop waits again.
  virtual void RunSoon() = 0;
  /// Makes Gateway::OnWake run in worker `worker`.
  virtual void Wake(int worker) = 0;
  /// Bytes of the longest message.
  static constexpr size_t kMaxMessage = 48 << 10;
  /// Makes Gateway::OnMessage run in the worker with this name, which may use another zone. False: there is
  /// none, or it has too many messages.
  virtual bool Send(uint64_t wake, std::string_view message) = 0;
  virtual void* Watch(int fd, Watcher& watcher) = 0;
  virtual void Unwatch(void* watch) = 0;
  /// Looks up the addresses of a name and calls `lookup` once. Null: there is no name server.
  virtual void* Resolve(std::string_view name, Lookup& lookup) = 0;
  /// Ends a lookup that has not called back.
  virtual void CancelResolve(void* handle) = 0;
  /// Writes to the error log.
  virtual void Log(bool error, std::string_view message) = 0;
};

}  // namespace moesaic::proxy
