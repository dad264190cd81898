// The HTTP/1.1 front: accepts connections and reads requests within limits, on threads of its own.
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
  int port = 8000;  ///< 0: any free one
  int threads = 4;
  int64_t max_connections = 1024;                    ///< more are answered with 503 and closed
  int64_t max_header_bytes = 16 << 10;               ///< 431
  int64_t max_body_bytes = 16 << 20;                 ///< 413
  int64_t max_total_body_bytes = 256 << 20;          ///< bodies of all requests together; more get 503
  std::chrono::milliseconds header_timeout{10'000};  ///< first byte to the header's end, then closed
  std::chrono::milliseconds body_timeout{60'000};    ///< header's end to the body's end, then closed
  std::chrono::milliseconds idle_timeout{75'000};    ///< between requests
  std::chrono::milliseconds write_timeout{60'000};   ///< a client that does not read has left
  std::chrono::milliseconds ping_interval{15'000};   ///< comments in an event stream that is silent; 0: none
  std::chrono::milliseconds half_close_grace{200};   ///< a client's end of sending to the first probe for it
  std::string tls_certificate = {}, tls_key = {};    ///< PEM files; both empty: plain HTTP
};

/// Destroying it closes all connections and joins the threads.
class HttpServer {
 public:
  /// Binds: from now on clients connect, and wait. Unavailable when the address can't be had; other errors
  /// name the TLS file that can't be used.
  static StatusOr<std::unique_ptr<HttpServer>> Listen(const HttpOptions& options);
  virtual ~HttpServer() = default;

  /// Begins to read requests and to answer them, at once and on other threads: all that `hooks` use, this
  /// server among it, must be in its place. Once.
  virtual void Start(HttpHooks hooks) = 0;
  /// Lets `hooks` answer from the next request on. Those before them must have refused all requests, since
  /// one that they admitted would now be handled by these.
  virtual void Switch(HttpHooks hooks) = 0;
  /// Reads the TLS files again, for connections that come from now on. On an error the former ones stay in
  /// use. Any thread. Does nothing for plain HTTP.
  virtual Status ReloadTls() = 0;
  virtual int port() const = 0;
  /// Closes all connections and takes no more. Lanes still run.
  virtual void Close() = 0;
  virtual int64_t connections() const = 0;
  /// Requests whose answer has not ended.
  virtual int64_t active_requests() const = 0;
};

}  // namespace moesaic::server
