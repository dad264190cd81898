// Accepts HTTP/1.1 connections and reads requests within limits, on threads of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/http.h"

namespace moesaic::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  ///< 0 chooses a free port
  int threads = 4;
  int64_t max_connections = 1024;                    ///< more are answered with 503 and closed
  int64_t max_header_bytes = 16 << 10;               ///< longer ones are answered with 431
  int64_t max_body_bytes = 16 << 20;                 ///< longer ones are answered with 413
  int64_t max_total_body_bytes = 256 << 20;          ///< bytes of all bodies; more are answered with 503
  std::chrono::milliseconds header_timeout{10'000};  ///< time from the first byte to the header's end
  std::chrono::milliseconds body_timeout{60'000};    ///< time from the header's end to the body's end
  std::chrono::milliseconds idle_timeout{75'000};    ///< time between two requests
  std::chrono::milliseconds write_timeout{60'000};  ///< time after which a client that does not read has left
  std::chrono::milliseconds ping_interval{
      15'000};  ///< interval of comments in a silent stream; 0 disables them
  std::chrono::milliseconds half_close_grace{
      200};                                        ///< time from a client's end of sending to the first probe
  std::string tls_certificate = {}, tls_key = {};  ///< paths of PEM files; both empty for plain HTTP
};

/// The destructor closes all connections and joins the threads.
class HttpServer {
 public:
  /// Binds the address. Clients can connect from then on, and wait for Start. Returns Unavailable when the
  /// address is taken. Other errors name the TLS file that cannot be used.
  static StatusOr<std::unique_ptr<HttpServer>> Listen(const HttpOptions& options);
  virtual ~HttpServer() = default;

  /// Begins to read and answer requests on other threads. All objects that `hooks` use, this server among
  /// them, must exist before the call. Call it once.
  virtual void Start(HttpHooks hooks) = 0;
  /// Uses `hooks` from the next request on. The former hooks must have refused all requests, since `hooks`
  /// would handle a request that the former ones admitted.
  virtual void Switch(HttpHooks hooks) = 0;
  /// Reads the TLS files again, for later connections. Keeps the former certificate on an error. Any thread
  /// may call it. Does nothing for plain HTTP.
  virtual Status ReloadTls() = 0;
  virtual int port() const = 0;
  /// Closes all connections and accepts no more. Executors still run.
  virtual void Close() = 0;
  virtual int64_t connections() const = 0;
  /// Returns the number of requests whose answer has not ended.
  virtual int64_t active_requests() const = 0;
};

}  // namespace moesaic::server
