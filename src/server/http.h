// The interface between the transport and the router: complete requests, and answers sent at once or in
// pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moesaic::server {

using Headers = std::vector<std::pair<std::string, std::string>>;

/// Status in the log and metrics of a request whose client left before the answer; nginx's number.
inline constexpr int kClientLeft = 499;

struct HttpRequest {
  std::string method;  ///< "POST"
  /// Visible ASCII without the query. Percent-encoding is well-formed, and unreserved characters have none.
  std::string path;
  std::string query;  ///< text after the '?', as sent
  Headers headers;    ///< names in lower case; "host" is that of the URI where the request line has one
  std::string body;
  std::string peer;  ///< the client's address, without the port

  /// Returns the first header of that name, which is in lower case, or "".
  std::string_view Header(std::string_view name) const;
};

/// A complete answer.
struct HttpResponse {
  int status = 200;
  Headers headers;
  std::string body;
};

/// Writes one request's answer. Any thread may call all methods. Calls after the end, or after the client has
/// left, do nothing. Destroying the last reference before the answer has ended closes the connection.
class ResponseWriter {
 public:
  virtual ~ResponseWriter() = default;

  /// Sends a complete answer.
  virtual void Send(HttpResponse response) = 0;

  /// Begins an answer in pieces. `Write` appends a piece and `End` completes the answer.
  virtual void Start(int status, Headers headers) = 0;
  virtual void Write(std::string piece) = 0;
  virtual void End() = 0;

  /// Calls `left` once if the client leaves before the answer has ended, and at once if it has left already.
  /// A client that only ends its sending side still gets its answer.
  virtual void OnClientLeft(std::function<void()> left) = 0;
};

/// Runs tasks one after another on the server's threads. Any thread may post. The server runs all posted
/// tasks before its destructor returns.
class SerialExecutor {
 public:
  virtual ~SerialExecutor() = default;
  virtual void Post(std::function<void()> task) = 0;
};

/// Callbacks of the transport. Several threads may call each at the same time.
struct HttpHooks {
  /// Checks a request before its body is read. A returned answer refuses it, and the body is not read.
  std::function<std::optional<HttpResponse>(const HttpRequest& head)> admit;
  /// Answers a request. Runs on `executor`, which belongs to this request only.
  std::function<void(HttpRequest request, std::shared_ptr<ResponseWriter> writer,
                     std::shared_ptr<SerialExecutor> executor)>
      handle;
  /// Returns the answer to a request that the transport refuses, e.g. with 400, 413 or 503. `head` may be
  /// empty.
  std::function<HttpResponse(const HttpRequest& head, int status, const std::string& message)> refuse;
};

}  // namespace moesaic::server
