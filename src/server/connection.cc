#include "server/connection.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <utility>

#include "base/check.h"
#include "server/exchange.h"
#include "server/response_text.h"

namespace moesaic::server {

namespace asio = boost::asio;

namespace {

constexpr size_t kPipelineBytes = 64 << 10;  // bytes read ahead of the answer; more stay in the socket
// Maximum bytes of a body that no endpoint reads: only POST has one. Such requests need no key.
constexpr int64_t kMaxUnreadBody = 64 << 10;
constexpr size_t kLargeBody = 64 << 10;    // bytes of a body whose handler may take long
constexpr size_t kLingerBytes = 64 << 20;  // bytes read after an error, so that the client receives it
constexpr std::chrono::seconds kLingerTime{2};
// A connection is closed for another one only after this time without a request, because its client may be
// sending one.
constexpr std::chrono::seconds kMinIdle{1};
constexpr const char* kPing = ": ping\n\n";
constexpr const char* kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr std::chrono::milliseconds kMaxProbeInterval{15'000};

// Bytes of a body whose handler has not ended. Its client may have left.
class HeldBytes {
 public:
  HeldBytes(std::shared_ptr<HttpShared> shared, int64_t bytes) : shared_(std::move(shared)), bytes_(bytes) {}
  ~HeldBytes() { shared_->body_bytes -= bytes_; }
  HeldBytes(const HeldBytes&) = delete;
  HeldBytes& operator=(const HeldBytes&) = delete;

 private:
  const std::shared_ptr<HttpShared> shared_;
  const int64_t bytes_;
};

// Reports the end of a handler, also one that throws. Null: the request is not large.
class LargeEnd {
 public:
  explicit LargeEnd(LargeRequests* large) : large_(large) {}
  ~LargeEnd() {
    if (large_ != nullptr) large_->End();
  }
  LargeEnd(const LargeEnd&) = delete;
  LargeEnd& operator=(const LargeEnd&) = delete;

 private:
  LargeRequests* const large_;
};

}  // namespace

template <typename Strand>
class StrandExecutor : public SerialExecutor {
 public:
  explicit StrandExecutor(Strand strand) : strand_(std::move(strand)) {}
  void Post(std::function<void()> task) override { asio::post(strand_, std::move(task)); }

 private:
  Strand strand_;
};

void LargeRequests::Begin(Task start) {
  {
    const std::lock_guard lock(mutex_);
    if (running_ == most_) {
      waiting_.push_back(std::move(start));
      return;
    }
    ++running_;
  }
  start();
}

void LargeRequests::End() {
  Task next;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) {
      --running_;
      return;
    }
    next = std::move(waiting_.front());
    waiting_.pop_front();
  }
  next();
}

Connection::Connection(std::unique_ptr<Stream> stream, std::shared_ptr<HttpShared> shared,
                       Admission admission)
    : stream_(std::move(stream)),
      executor_(stream_->executor()),
      read_deadline_(executor_),
      write_deadline_(executor_),
      ping_(executor_),
      probe_(executor_),
      shared_(std::move(shared)),
      admission_(admission) {
  ++(admission_ == Admission::kServe ? shared_->connections : shared_->refused_connections);
}

Connection::~Connection() {
  ReleaseBody();
  if (phase_ == Phase::kAnswering) --shared_->active_requests;
  --(admission_ == Admission::kServe ? shared_->connections : shared_->refused_connections);
}

void Connection::Run() {
  asio::dispatch(executor_, [self = shared_from_this()] {
    self->read_deadline_.Set(self->shared_->options.header_timeout, self);
    self->stream_->Open(self);
  });
}

void Connection::Abort() {
  asio::post(executor_, [self = shared_from_this()] { self->ClientLeft(); });
}

void Connection::OnOpen(ErrorCode error) {
  if (phase_ == Phase::kClosed) return;
  if (error == MakeError(StreamError::kPlainHttp)) {
    stream_ = stream_->TakePlain();
    return Refuse({400, "this port speaks TLS: use https://"});
  }
  if (error) return Close();
  if (admission_ == Admission::kRefuse) {
    return Refuse({503, fmt::format("{} connections are open, as many as --max-connections allows",
                                    shared_->options.max_connections)});
  }
  BeginIdle();
}

void Connection::BeginIdle() {
  phase_ = Phase::kIdle;
  idle_since_ = std::chrono::steady_clock::now().time_since_epoch().count();
  read_deadline_.Set(shared_->options.idle_timeout, shared_from_this());
  Advance();
}

bool Connection::CloseIdle() {
  int64_t since = idle_since_;
  const auto latest = std::chrono::steady_clock::now() - kMinIdle;
  if (since == 0 || since > latest.time_since_epoch().count()) return false;
  if (!idle_since_.compare_exchange_strong(since, 0)) return false;
  asio::post(executor_, [self = shared_from_this()] {
    if (self->phase_ == Phase::kIdle && self->idle_since_ == 0) self->Close();  // not after another request
  });
  return true;
}

void Connection::Read() {
  if (reading_ || at_end_) return;
  reading_ = true;
  stream_->Read(asio::buffer(received_), shared_from_this());
}

void Connection::OnRead(ErrorCode error, size_t bytes) {
  reading_ = false;
  if (phase_ == Phase::kClosed || phase_ == Phase::kFinishing) return;
  input_.append(received_.data(), bytes);
  if (error && error != asio::error::eof) return ClientLeft();
  if (error) {
    at_end_ = true;
    if (phase_ == Phase::kAnswering && !ended_) ProbeLater();
  }
  Advance();
}

// Parses the next part of the input for the current phase and starts a read when it is incomplete.
void Connection::Advance() {
  if (phase_ == Phase::kHead || (phase_ == Phase::kIdle && BeginRequest())) {
    TakeHead();
  } else if (phase_ == Phase::kBody) {
    TakeBody();
  }
  if (phase_ == Phase::kIdle && at_end_) return Finish();
  const bool wants = phase_ == Phase::kIdle || phase_ == Phase::kHead || phase_ == Phase::kBody;
  if (wants) return Read();
  if (phase_ != Phase::kAnswering) return;
  if (close_) input_.clear();  // nothing after this request is answered
  if (input_.size() < kPipelineBytes) return Read();
  if (!ended_) ProbeLater();  // no read is pending that would end with the connection
}

// Skips empty lines, which some clients send after a body (RFC 9112, section 2.2).
bool Connection::BeginRequest() {
  size_t blank = 0;
  while (input_.compare(blank, 2, "\r\n") == 0) blank += 2;
  input_.erase(0, blank);
  if (input_.empty() || (input_ == "\r" && !at_end_)) return false;
  phase_ = Phase::kHead;
  idle_since_ = 0;
  scanner_ = {};
  head_ = {};
  head_only_ = head_limited_ = false;
  ended_ = head_sent_ = false;
  chunked_ = events_ = false;
  return true;
}

void Connection::TakeHead() {
  const auto limit = static_cast<size_t>(shared_->options.max_header_bytes);
  const size_t size = scanner_.Scan(std::string_view(input_).substr(0, limit));
  if (scanner_.refusal()) return Refuse(*scanner_.refusal());
  if (size == 0 && input_.size() >= limit) {
    if (!scanner_.has_line()) return Refuse({414, "the request line is too long"});
    return Refuse({431, "the request's header is too long"});
  }
  if (size == 0) {
    if (at_end_) return Refuse({400, "the request ended within its header"});
    if (!std::exchange(head_limited_, true)) {
      read_deadline_.Set(shared_->options.header_timeout, shared_from_this());
    }
    return;
  }
  const auto refusal = ReadRequestHead(std::string_view(input_).substr(0, size), head_);
  input_.erase(0, size);
  head_only_ = head_.request.method == "HEAD";
  close_ = !head_.keep_alive;
  if (refusal) return Refuse(*refusal);
  AdmitHead();
}

void Connection::AdmitHead() {
  head_.request.peer = stream_->PeerAddress();
  if (const std::optional<HttpResponse> refusal = shared_->Hooks()->admit(head_.request)) {
    phase_ = Phase::kRefusing;
    return SendWhole(*refusal, head_.framing != BodyFraming::kNone);
  }
  const int64_t most = shared_->options.max_body_bytes;
  body_ = RequestBody(head_, head_.request.method == "POST" ? most : std::min(most, kMaxUnreadBody));
  if (body_.refusal()) return Refuse(*body_.refusal());
  phase_ = Phase::kBody;
  if (!body_.complete()) {
    read_deadline_.Set(shared_->options.body_timeout, shared_from_this());
    if (head_.expects_continue) Enqueue(kContinue);
  }
  TakeBody();
}

// Reserves the bytes of the body that have arrived, within the limit of all bodies. A client that announces
// more, or a chunked body, takes no room from others before it sends the bytes.
bool Connection::ReserveBody() {
  const int64_t more = static_cast<int64_t>(body_.bytes().size()) - reserved_;
  reserved_ += more;
  if ((shared_->body_bytes += more) <= shared_->options.max_total_body_bytes || more == 0) return true;
  ReleaseBody();
  return false;
}

void Connection::ReleaseBody() { shared_->body_bytes -= std::exchange(reserved_, 0); }

void Connection::TakeBody() {
  body_.Take(input_);
  if (body_.refusal()) return Refuse(*body_.refusal());
  if (!ReserveBody()) return Refuse({503, "too many bytes of requests are in flight"});
  if (body_.complete()) return Dispatch();
  if (at_end_) Refuse({400, "the request ended within its body"});
}

void Connection::Dispatch() {
  HttpRequest request = std::move(head_.request);
  request.body = std::move(body_.bytes());
  phase_ = Phase::kAnswering;
  read_deadline_.Clear();
  ++exchange_number_;
  ++shared_->active_requests;
  auto exchange = std::make_shared<Exchange>(shared_from_this(), exchange_number_);
  exchange_ = exchange;
  if (at_end_) ProbeLater();
  // The handler gets a strand of its own, so that a long handler does not delay the connection's strand,
  // which notices that the client leaves.
  using Strand = asio::strand<asio::io_context::executor_type>;
  const auto* own = executor_.target<Strand>();
  MOESAIC_CHECK(own != nullptr);  // HttpServer gives every connection a strand
  auto executor = std::make_shared<StrandExecutor<Strand>>(Strand(own->get_inner_executor()));
  const bool large = request.body.size() > kLargeBody;
  auto held = std::make_shared<const HeldBytes>(shared_, std::exchange(reserved_, 0));
  auto handle = [shared = shared_, held = std::move(held), request = std::move(request),
                 exchange = std::move(exchange), executor, large]() mutable {
    const LargeEnd end(large ? &shared->large : nullptr);
    if (large && exchange->client_left()) {
      shared->Hooks()->refuse(request, kClientLeft, "the client left before its request was read");
      return;
    }
    shared->Hooks()->handle(std::move(request), std::move(exchange), std::move(executor));
    held.reset();  // the handler has freed the body
  };
  if (!large) return executor->Post(std::move(handle));
  shared_->large.Begin(
      [executor, handle = std::move(handle)]() mutable { executor->Post(std::move(handle)); });
}

// Sends bytes to a client now and then. A closed socket rejects them, and AwaitReset() reports that. The end
// of the client's side does not show that it has closed, since a client that waits for the answer may end it
// too. After bytes that are not read, the end is not seen at all.
void Connection::ProbeLater() {
  spdlog::debug("connection of {}: probing the client", stream_->PeerAddress());
  if (!std::exchange(watching_, true)) stream_->AwaitReset(shared_from_this());
  probe_after_ = shared_->options.half_close_grace;
  probe_.expires_after(probe_after_);
  Probe();
}

void Connection::Probe() {
  probe_.async_wait([self = shared_from_this(), number = exchange_number_](ErrorCode error) {
    if (error || !self->Answers(number)) return;
    if (self->events_) {
      self->WritePiece(kPing);
    } else if (!self->head_sent_) {
      if (self->head_.old_version) return self->ClientLeft();  // HTTP/1.0 has no interim responses
      self->Enqueue(kContinue);
    }
    self->probe_after_ = std::min(self->probe_after_ * 2, kMaxProbeInterval);
    self->probe_.expires_after(self->probe_after_);
    self->Probe();
  });
}

bool Connection::Answers(uint64_t number) const {
  return phase_ == Phase::kAnswering && !ended_ && number == exchange_number_;
}

std::string Connection::HeadText(int status, const Headers& headers, std::optional<size_t> length) const {
  std::string text = ResponseHead(status, headers);
  // RFC 9110, 8.6: 204 has no length, and 304 may only have that of the body it leaves out.
  if (length && status != 204 && status != 304) text += fmt::format("content-length: {}\r\n", *length);
  if (!length && chunked_) text += "transfer-encoding: chunked\r\n";
  text += close_ ? "connection: close\r\n" : "connection: keep-alive\r\n";
  return text + "\r\n";
}

void Connection::SendWhole(const HttpResponse& response, bool close) {
  close_ = close_ || close || (at_end_ && input_.empty());
  std::string bytes = HeadText(response.status, response.headers, response.body.size());
  if (!head_only_) bytes += response.body;
  head_sent_ = true;
  ended_ = true;  // before Enqueue, which may notice that the client has left
  Enqueue(std::move(bytes));
  EndAnswer();
}

void Connection::Refuse(const HttpRefusal& refusal) {
  phase_ = Phase::kRefusing;
  head_.request.peer = stream_->PeerAddress();  // for the log, when the header is incomplete
  SendWhole(shared_->Hooks()->refuse(head_.request, refusal.status, refusal.message), true);
}

void Connection::StartPieces(int status, const Headers& headers) {
  chunked_ = !head_.old_version;
  close_ = close_ || head_.old_version ||
           (at_end_ && input_.empty());  // without chunks, closing the connection ends the body
  for (const auto& [name, value] : headers) {
    events_ = events_ || (Lower(name) == "content-type" && value.starts_with("text/event-stream"));
  }
  head_sent_ = true;
  Enqueue(HeadText(status, headers, std::nullopt));
  ArmPing();
}

void Connection::WritePiece(std::string piece) {
  if (!head_only_) Enqueue(chunked_ ? Chunk(piece) : std::move(piece));
}

void Connection::EndPieces() {
  if (chunked_ && !head_only_) Enqueue("0\r\n\r\n");
  ended_ = true;
  EndAnswer();
}

void Connection::ArmPing() {
  if (!events_ || ended_ || shared_->options.ping_interval.count() == 0) return;
  ping_.expires_after(shared_->options.ping_interval);
  ping_.async_wait([self = shared_from_this(), number = exchange_number_](ErrorCode error) {
    if (error || !self->Answers(number)) return;
    self->WritePiece(kPing);
    self->ArmPing();
  });
}

void Connection::Enqueue(std::string bytes) {
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
  write_deadline_.Set(shared_->options.write_timeout, shared_from_this());
  stream_->Write(asio::buffer(writing_), shared_from_this());
}

void Connection::OnWritten(ErrorCode error) {
  flushing_ = false;
  write_deadline_.Clear();
  if (phase_ == Phase::kClosed) return;
  if (error) return ClientLeft();
  if (!queued_.empty()) return Flush();
  if (!ended_) return ArmPing();
  if (phase_ == Phase::kAnswering || phase_ == Phase::kRefusing) Next();
}

void Connection::EndAnswer() {
  ping_.cancel();
  probe_.cancel();
  if (!flushing_ && queued_.empty()) Next();
}

void Connection::Next() {
  if (phase_ == Phase::kAnswering) --shared_->active_requests;
  ReleaseBody();
  ended_ = false;
  if (close_) return Finish();
  BeginIdle();
}

void Connection::Finish() {
  phase_ = Phase::kFinishing;
  idle_since_ = 0;
  read_deadline_.Set(kLingerTime, shared_from_this());
  stream_->Finish(kLingerBytes, shared_from_this());
}

void Connection::OnExpired() {
  if (phase_ == Phase::kIdle) return Finish();
  spdlog::debug("connection of {}: closed by a time limit while {}", stream_->PeerAddress(), Activity());
  ClientLeft();
}

const char* Connection::Activity() const {
  switch (phase_) {
    case Phase::kOpening:
      return "opening TLS";
    case Phase::kHead:
      return "reading a header";
    case Phase::kBody:
      return "reading a body";
    case Phase::kAnswering:
    case Phase::kRefusing:
      return "writing an answer";
    default:
      return "closing";
  }
}

void Connection::ClientLeft() {
  if (const auto exchange = exchange_.lock(); exchange && phase_ == Phase::kAnswering && !ended_) {
    exchange->NotifyClientLeft();
  }
  Close();
}

void Connection::Close() {
  if (phase_ == Phase::kClosed) return;
  if (phase_ == Phase::kAnswering) --shared_->active_requests;
  phase_ = Phase::kClosed;
  idle_since_ = 0;
  ReleaseBody();
  queued_.clear();
  read_deadline_.Cancel();
  write_deadline_.Cancel();
  ping_.cancel();
  probe_.cancel();
  stream_->Close();
}

}  // namespace moesaic::server
