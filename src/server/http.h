// What the transport hands up and takes back: requests read whole, and answers sent whole or piece by piece.
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

struct HttpRequest {
  std::string method;  ///< "POST"
  std::string path;    ///< visible ASCII, without the query; unreserved characters are never percent-encoded
  std::string query;   ///< after the '?', as sent
  Headers headers;     ///< names in lower case; "host" is the URI's where the request line has a whole URI
  std::string body;
  std::string peer;  ///< the client's address, without the port

  /// The first header of that (lower case) name; empty when there is none.
  std::string_view Header(std::string_view name) const;
};

/// Decodes %XX. The path of an HttpRequest has no malformed ones.
std::string PercentDecoded(std::string_view text);

/// A whole answer.
struct HttpResponse {
  int status = 200;
  Headers headers;
  std::string body;
};

/// One request's answer. Any thread may call; calls after the end, or after the client left, do nothing.
/// Destroying the last reference before an answer ended closes the connection.
class ResponseWriter {
 public:
  virtual ~ResponseWriter() = default;

  /// Sends the whole answer.
  virtual void Send(HttpResponse response) = 0;

  /// Begins an answer that comes in pieces; `Write` adds to it and `End` completes it.
  virtual void Start(int status, Headers headers) = 0;
  virtual void Write(std::string piece) = 0;
  virtual void End() = 0;

  /// `left` runs once if the client leaves before the answer ended, at once if it has left already. A client
  /// that only ends its sending side still gets its answer.
  virtual void OnClientLeft(std::function<void()> left) = 0;
};

/// Runs tasks one after another on the server's threads. Any thread may post; the server runs what was posted
/// before it is destroyed.
class Lane {
 public:
  virtual ~Lane() = default;
  virtual void Post(std::function<void()> task) = 0;
};

/// What the transport asks of the layer above it. All may be called from several threads at once.
struct HttpHooks {
  /// Looks at a request whose body is still to come; an answer refuses it, and the body is not read.
  std::function<std::optional<HttpResponse>(const HttpRequest& head)> admit;
  /// Answers a request. Runs on `lane`, which is the request's own.
  std::function<void(HttpRequest request, std::shared_ptr<ResponseWriter> writer, std::shared_ptr<Lane> lane)>
      handle;
  /// Shapes an answer to what the transport itself refuses, such as 400, 408 or 413. `head` may be empty.
  std::function<HttpResponse(const HttpRequest& head, int status, const std::string& message)> refuse;
};

}  // namespace moesaic::server
