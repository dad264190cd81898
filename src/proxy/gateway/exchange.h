// One HTTP exchange with an engine.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "proxy/gateway/timers.h"
#include "proxy/gateway/transport.h"
#include "proxy/protocol/response_reader.h"

namespace moesaic::proxy {

struct ExchangeTimeouts {
  Nanos connect = 5 * kSecond;
  Nanos first_byte = 600 * kSecond;  ///< of the answer's body, after the connection was established
  Nanos idle = 600 * kSecond;
};

class Exchange {
 public:
  /// Exactly one of OnEnd and OnError ends an exchange, unless Cancel does. Callbacks may cancel the exchange
  /// but must not destroy it: Gateway::DestroyLater does.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void OnHead(Exchange& exchange) = 0;
    virtual void OnBody(Exchange& exchange, std::string_view bytes) = 0;
    virtual void OnEnd(Exchange& exchange) = 0;
    virtual void OnError(Exchange& exchange, const Status& status) = 0;
  };

  Exchange(Transport& transport, Timers& timers, Handler& handler)
      : transport_(transport), timer_(timers), handler_(&handler) {}
  ~Exchange() { Cancel(); }

  /// Sends `request`, an HTTP request without its body or a whole one, and `body` if there is one. `once`:
  /// the engine must not read the request twice, so that no idle connection is used, which it may be closing.
  void Start(const EngineAddress& address, std::string request, const ExchangeTimeouts& timeouts,
             SharedBody body = nullptr, bool once = false);
  /// Ends the exchange without a callback and closes its connection.
  void Cancel();
  /// Sets another object that handles the rest.
  void SetHandler(Handler& handler) { handler_ = &handler; }
  void Pause(bool paused);

  bool live() const { return live_; }
  bool connected() const { return connected_; }
  bool sent() const { return sent_; }  ///< a connection was established: the engine may have the request
  bool answered() const { return answered_; }  ///< a byte of the answer has arrived
  const ResponseReader& response() const { return reader_; }

  // Called by the transport.
  void OnConnected();
  void OnData(std::string_view bytes);
  void OnClosed();
  void OnFailed(std::string_view reason);
  /// Called when an exception left a callback. Ends the exchange.
  void OnException(std::string_view what);

 private:
  void Connect(bool reuse);
  void Fail(const Status& status);
  void Watchdog();
  bool RetryFresh();

  Transport& transport_;
  Timer timer_;
  Handler* handler_;
  EngineAddress address_;
  std::string request_;
  SharedBody body_;  // may be null
  ExchangeTimeouts timeouts_;
  ResponseReader reader_;
  void* connection_ = nullptr;
  bool live_ = false, connected_ = false, sent_ = false, reused_ = false, answered_ = false,
       head_reported_ = false, body_begun_ = false, paused_ = false;
  Nanos last_ = 0;
};

}  // namespace moesaic::proxy
