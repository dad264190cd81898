#include "server/connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <mutex>
#include <utility>

#include "base/check.h"

namespace moesaic::server {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr size_t kPipelineBytes = 64 << 10;  // read ahead of the answer; more waits in the socket
constexpr int64_t kLingerBytes = 64 << 20;   // of a refused body, read so that the client sees the answer
constexpr std::chrono::seconds kLingerTime{2};
constexpr const char* kPing = ": ping\n\n";

std::string Text(beast::string_view view) { return std::string(view.data(), view.size()); }

std::string Lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

std::string Chunk(const std::string& piece) { return fmt::format("{:x}\r\n{}\r\n", piece.size(), piece); }

}  // namespace

template <typename Strand>
class StrandLane : public Lane {
 public:
  explicit StrandLane(Strand strand) : strand_(std::move(strand)) {}
  void Post(std::function<void()> task) override { asio::post(strand_, std::move(task)); }

 private:
  Strand strand_;
};

// The writer that the layer above holds. Calls travel to the connection's strand.
class Exchange : public ResponseWriter, public std::enable_shared_from_this<Exchange> {
 public:
  explicit Exchange(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  ~Exchange() override {
    On([](Connection& connection) {
      if (connection.answering_ && !connection.ended_) connection.Close();
    });
  }

  void Send(HttpResponse response) override {
    On([response = std::move(response)](Connection& connection) {
      if (connection.answering_ && !connection.ended_) connection.SendWhole(response, false);
    });
  }

  void Start(int status, Headers headers) override {
    On([status, headers = std::move(headers)](Connection& connection) {
      if (connection.answering_ && !connection.ended_) connection.StartPieces(status, headers);
    });
  }

  void Write(std::string piece) override {
    if (piece.empty()) return;  // an empty chunk would end the answer
    On([piece = std::move(piece)](Connection& connection) mutable {
      if (!connection.answering_ || connection.ended_ || connection.head_only_) return;
      connection.Enqueue(connection.chunked_ ? Chunk(piece) : std::move(piece));
    });
  }

  void End() override {
    On([](Connection& connection) {
      if (!connection.answering_ || connection.ended_) return;
      if (connection.chunked_ && !connection.head_only_) connection.Enqueue("0\r\n\r\n");
      connection.EndAnswer();
    });
  }

  void OnClientLeft(std::function<void()> left) override {
    {
      const std::lock_guard lock(mutex_);
      if (!gone_) {
        left_ = std::move(left);
        return;
      }
    }
    left();
  }

  void Gone() {
    std::function<void()> left;
    {
      const std::lock_guard lock(mutex_);
      if (gone_) return;
      gone_ = true;
      left = std::move(left_);
    }
    if (left) left();
  }

 private:
  // One exchange belongs to one request; the connection may be at a later one when a task arrives, and then
  // `ended_` or the exchange's own identity has changed.
  template <typename Task>
  void On(Task task) {
    std::shared_ptr<Connection> connection = connection_;
    asio::post(connection->stream_.get_executor(),
               [connection, number = number_, task = std::move(task)]() mutable {
                 if (connection->closed_ || connection->exchange_number_ != number) return;
                 task(*connection);
               });
  }

  std::shared_ptr<Connection> connection_;
  const uint64_t number_ = connection_->exchange_number_;
  std::mutex mutex_;
  std::function<void()> left_;
  bool gone_ = false;
};

Connection::Connection(asio::ip::tcp::socket socket, std::shared_ptr<HttpShared> shared)
    : stream_(std::move(socket)), ping_(stream_.get_executor()), shared_(std::move(shared)) {
  ++shared_->connections;
}

Connection::~Connection() {
  ReleaseBody();
  if (answering_) --shared_->active_requests;
  --shared_->connections;
}

void Connection::Run() {
  asio::dispatch(stream_.get_executor(), [self = shared_from_this()] {
    ErrorCode ignored;
    self->stream_.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
    self->AwaitRequest();
  });
}

void Connection::Abort() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] { self->ClientLeft(); });
}

void Connection::AwaitRequest() {
  if (buffer_.size() > 0) return ReadHeader();
  stream_.expires_after(shared_->options.idle_timeout);
  stream_.async_read_some(buffer_.prepare(4096), [self = shared_from_this()](ErrorCode error, size_t bytes) {
    self->buffer_.commit(bytes);
    if (error) return self->Close();
    self->ReadHeader();
  });
}

void Connection::ReadHeader() {
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(shared_->options.max_header_bytes));
  parser_->body_limit(static_cast<uint64_t>(shared_->options.max_body_bytes));
  request_ = {};
  head_only_ = false;
  stream_.expires_after(shared_->options.header_timeout);
  http::async_read_header(stream_, buffer_, *parser_,
                          [self = shared_from_this()](ErrorCode error, size_t) { self->OnHeader(error); });
}

void Connection::OnHeader(ErrorCode error) {
  if (error == beast::error::timeout || error == http::error::end_of_stream ||
      error == asio::error::operation_aborted || error == asio::error::eof ||
      error == asio::error::connection_reset || error == http::error::partial_message) {
    return Close();  // the stream's own timeout has closed the socket already
  }
  if (error == http::error::header_limit) return Refuse(431, "the request's header is too long");
  if (error == http::error::body_limit) {
    return Refuse(413,
                  fmt::format("the request's body is longer than {} bytes", shared_->options.max_body_bytes));
  }
  if (error) return Refuse(400, fmt::format("not an HTTP request: {}", error.message()));

  const auto& head = parser_->get();
  old_version_ = head.version() < 11;
  request_.method = Text(head.method_string());
  const std::string target = Text(head.target());
  const size_t question = std::min(target.find('?'), target.size());
  request_.path = target.substr(0, question);
  if (question < target.size()) request_.query = target.substr(question + 1);
  for (const auto& field : head) {
    request_.headers.emplace_back(Lower(Text(field.name_string())), Text(field.value()));
  }
  ErrorCode ignored;
  request_.peer = stream_.socket().remote_endpoint(ignored).address().to_string();
  head_only_ = request_.method == "HEAD";
  close_ = !head.keep_alive();

  if (const std::optional<HttpResponse> refusal = shared_->Hooks()->admit(request_)) {
    return SendWhole(*refusal, !parser_->is_done());
  }
  if (parser_->is_done()) return OnBody({});
  if (!ReserveBody()) return;
  ReadBody();
}

// Reserves room for the body among those of all requests, or refuses.
bool Connection::ReserveBody() {
  const auto length = parser_->content_length();
  const int64_t bytes =
      length ? static_cast<int64_t>(std::min<uint64_t>(*length, INT64_MAX)) : shared_->options.max_body_bytes;
  if (bytes > shared_->options.max_body_bytes) {
    Refuse(413, fmt::format("the request's body has {} bytes; the limit is {}", bytes,
                            shared_->options.max_body_bytes));
    return false;
  }
  reserved_ = bytes;
  if ((shared_->body_bytes += bytes) > shared_->options.max_total_body_bytes) {
    ReleaseBody();
    Refuse(503, "too many bytes of requests are in flight");
    return false;
  }
  return true;
}

void Connection::ReleaseBody() { shared_->body_bytes -= std::exchange(reserved_, 0); }

void Connection::ReadBody() {
  if (request_.Header("expect") == "100-continue") Enqueue("HTTP/1.1 100 Continue\r\n\r\n");
  stream_.expires_after(shared_->options.body_timeout);
  http::async_read(stream_, buffer_, *parser_,
                   [self = shared_from_this()](ErrorCode error, size_t) { self->OnBody(error); });
}

void Connection::OnBody(ErrorCode error) {
  if (error == http::error::body_limit) {
    return Refuse(413,
                  fmt::format("the request's body is longer than {} bytes", shared_->options.max_body_bytes));
  }
  if (error == http::error::bad_chunk || error == http::error::bad_chunk_extension ||
      error == http::error::bad_transfer_encoding) {
    return Refuse(400, fmt::format("the request's body is malformed: {}", error.message()));
  }
  if (error) return Close();
  request_.body = std::move(parser_->get().body());
  parser_.reset();
  answering_ = true;
  ended_ = false;
  chunked_ = events_ = false;
  ++exchange_number_;
  ++shared_->active_requests;
  auto exchange = std::make_shared<Exchange>(shared_from_this());
  exchange_ = exchange;
  Watch();
  // On a strand of its own, so that a handler that works for long does not hold the one that sees a leave.
  using Strand = asio::strand<asio::io_context::executor_type>;
  const auto* own = stream_.get_executor().target<Strand>();
  MOESAIC_CHECK(own != nullptr);  // HttpServer gives every connection one
  auto lane = std::make_shared<StrandLane<Strand>>(Strand(own->get_inner_executor()));
  lane->Post(
      [shared = shared_, request = std::move(request_), exchange = std::move(exchange), lane]() mutable {
        shared->Hooks()->handle(std::move(request), std::move(exchange), std::move(lane));
      });
}

void Connection::Watch() {
  if (watching_ || closed_ || buffer_.size() >= kPipelineBytes) return;
  watching_ = true;
  stream_.expires_never();
  stream_.async_read_some(buffer_.prepare(4096), [self = shared_from_this()](ErrorCode error, size_t bytes) {
    self->OnWatched(error, bytes);
  });
}

void Connection::OnWatched(ErrorCode error, size_t bytes) {
  watching_ = false;
  buffer_.commit(bytes);
  if (closed_) return;
  if (error && error != asio::error::operation_aborted) return ClientLeft();
  if (!ended_) return Watch();
  if (!flushing_) Next();  // else OnWritten goes on
}

std::string Connection::HeadText(int status, const Headers& headers, std::optional<size_t> length) const {
  std::string text = fmt::format("HTTP/1.1 {} {}\r\n", status,
                                 Text(http::obsolete_reason(static_cast<http::status>(status))));
  for (const auto& [name, value] : headers) text += fmt::format("{}: {}\r\n", name, value);
  // RFC 9110, 8.6: 204 has no length, and 304 none but that of the body it leaves out.
  const bool has_length = length && status != 204 && status != 304;
  if (has_length) text += fmt::format("content-length: {}\r\n", *length);
  if (!length && !old_version_) text += "transfer-encoding: chunked\r\n";
  text += close_ ? "connection: close\r\n" : "connection: keep-alive\r\n";
  return text + "\r\n";
}

void Connection::SendWhole(const HttpResponse& response, bool close) {
  close_ = close_ || close;
  std::string bytes = HeadText(response.status, response.headers, response.body.size());
  if (!head_only_) bytes += response.body;
  if (!answering_) {  // refused before it was read: linger while the client still sends
    ended_ = true;
    lingered_ = close ? kLingerBytes : 0;
  }
  Enqueue(std::move(bytes));
  if (answering_) return EndAnswer();
}

void Connection::Refuse(int status, const std::string& message) {
  answering_ = false;
  SendWhole(shared_->Hooks()->refuse(request_, status, message), true);
}

void Connection::StartPieces(int status, const Headers& headers) {
  chunked_ = !old_version_;
  close_ = close_ || old_version_;  // the end of the connection is the end of the answer
  for (const auto& [name, value] : headers) {
    events_ = events_ || (Lower(name) == "content-type" && value.starts_with("text/event-stream"));
  }
  Enqueue(HeadText(status, headers, std::nullopt));
  ArmPing();
}

void Connection::ArmPing() {
  if (!events_ || ended_ || closed_ || shared_->options.ping_interval.count() == 0) return;
  ping_.expires_after(shared_->options.ping_interval);
  ping_.async_wait([self = shared_from_this(), number = exchange_number_](ErrorCode error) {
    if (error || self->closed_ || self->ended_ || number != self->exchange_number_) return;
    self->Enqueue(self->chunked_ ? Chunk(kPing) : kPing);
    self->ArmPing();
  });
}

void Connection::Enqueue(std::string bytes) {
  if (closed_) return;
  if (queued_.empty()) {
    queued_ = std::move(bytes);
  } else {
    queued_ += bytes;
  }
  if (!flushing_) Flush();
}

void Connection::Flush() {
  flushing_ = true;
  writing_ = std::exchange(queued_, {});
  stream_.expires_after(shared_->options.write_timeout);
  asio::async_write(stream_, asio::buffer(writing_),
                    [self = shared_from_this()](ErrorCode error, size_t) { self->OnWritten(error); });
}

void Connection::OnWritten(ErrorCode error) {
  flushing_ = false;
  if (closed_) return;
  if (error) return ClientLeft();
  if (!queued_.empty()) return Flush();
  if (events_ && !ended_) ArmPing();
  if (!ended_) return;
  if (watching_) {
    stream_.cancel();  // OnWatched goes on
  } else {
    Next();
  }
}

void Connection::EndAnswer() {
  ended_ = true;
  ping_.cancel();
  if (!flushing_ && queued_.empty()) OnWritten({});
}

void Connection::Next() {
  if (answering_) {
    answering_ = false;
    --shared_->active_requests;
    ReleaseBody();
  }
  ++exchange_number_;
  ended_ = false;
  if (close_) return lingered_ > 0 ? Linger() : Close();
  AwaitRequest();
}

// Closing with unread bytes would reset the connection and may take the answer with it.
void Connection::Linger() {
  ErrorCode ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  stream_.expires_after(kLingerTime);
  Drain();
}

void Connection::Drain() {
  buffer_.clear();
  stream_.async_read_some(buffer_.prepare(64 << 10),
                          [self = shared_from_this()](ErrorCode error, size_t bytes) {
                            self->lingered_ -= static_cast<int64_t>(bytes);
                            if (error || self->lingered_ <= 0) return self->Close();
                            self->Drain();
                          });
}

void Connection::ClientLeft() {
  if (const auto exchange = exchange_.lock(); exchange && answering_ && !ended_) exchange->Gone();
  Close();
}

void Connection::Close() {
  if (closed_) return;
  closed_ = true;
  if (answering_) {
    answering_ = false;
    --shared_->active_requests;
  }
  ReleaseBody();
  queued_.clear();
  ping_.cancel();
  ErrorCode ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_.close();
}

}  // namespace moesaic::server
