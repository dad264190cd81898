// One client's connection. For the transport's own files only.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "server/http.h"
#include "server/http_server.h"

namespace moesaic::server {

/// What all connections of a server share.
struct HttpShared {
  std::shared_ptr<const HttpHooks> Hooks() const {
    const std::lock_guard lock(mutex);
    return hooks;
  }
  void SetHooks(HttpHooks next) {
    auto made = std::make_shared<const HttpHooks>(std::move(next));
    const std::lock_guard lock(mutex);
    hooks = std::move(made);
  }

  HttpOptions options;
  std::atomic<int64_t> connections{0};
  std::atomic<int64_t> active_requests{0};
  std::atomic<int64_t> body_bytes{0};
  mutable std::mutex mutex;
  std::shared_ptr<const HttpHooks> hooks;  // through the two above
};

class Exchange;

/// Lives as long as its handlers and its exchange. Everything but the constructor runs on its strand.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  /// The socket's executor is a strand.
  Connection(boost::asio::ip::tcp::socket socket, std::shared_ptr<HttpShared> shared);
  ~Connection();

  void Run();    // any thread
  void Abort();  // any thread: closes at once

 private:
  friend class Exchange;
  using ErrorCode = boost::beast::error_code;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  // Reading, in this order.
  void AwaitRequest();
  void ReadHeader();
  void OnHeader(ErrorCode error);
  void ReadBody();
  void OnBody(ErrorCode error);
  void Watch();  // while a request runs: sees the client leave
  void OnWatched(ErrorCode error, size_t bytes);
  bool ReserveBody();
  void ReleaseBody();

  // Answering.
  void SendWhole(const HttpResponse& response, bool close);
  void Refuse(int status, const std::string& message);
  void StartPieces(int status, const Headers& headers);
  void Enqueue(std::string bytes);
  void Flush();
  void OnWritten(ErrorCode error);
  void ArmPing();
  void EndAnswer();
  void Next();
  void Linger();
  void Drain();
  void ClientLeft();
  void Close();
  std::string HeadText(int status, const Headers& headers, std::optional<size_t> length) const;

  boost::beast::tcp_stream stream_;
  boost::asio::steady_timer ping_;
  const std::shared_ptr<HttpShared> shared_;
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  HttpRequest request_;
  std::weak_ptr<Exchange> exchange_;
  std::string queued_, writing_;
  int64_t reserved_ = 0;
  int64_t lingered_ = 0;
  uint64_t exchange_number_ = 0;  // tells a late call of an earlier request from one of this
  bool answering_ = false;        // a request is with the layer above
  bool ended_ = false;            // its answer is complete
  bool watching_ = false;         // a read is outstanding beside the answer
  bool flushing_ = false;
  bool chunked_ = false, events_ = false;
  bool close_ = false;  // after this answer
  bool head_only_ = false;
  bool old_version_ = false;  // HTTP/1.0
  bool closed_ = false;
};

}  // namespace moesaic::server
