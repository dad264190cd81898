#include "proxy/gateway/exchange.h"

#include <utility>

namespace moesaic::proxy {

void Exchange::Start(const EngineAddress& address, std::string request, const ExchangeTimeouts& timeouts,
                     SharedBody body, bool once) {
  constexpr size_t kSmallBody = 16 << 10;  // is sent as part of the head
  address_ = address;
  request_ = std::move(request);
  body_ = std::move(body);
  if (body_ != nullptr && body_->size() <= kSmallBody) {
    request_ += *body_;
    body_.reset();
  }
  timeouts_ = timeouts;
  live_ = true;
  Connect(/*reuse=*/!once);
}

void Exchange::Connect(bool reuse) {
  connected_ = answered_ = head_reported_ = body_begun_ = false;
  reader_ = ResponseReader(/*head=*/request_.starts_with("HEAD "));
  last_ = transport_.Now();
  const Transport::Connected connected = transport_.Connect(
      *this, address_, request_, body_ != nullptr ? std::string_view(*body_) : std::string_view(), reuse);
  connection_ = connected.connection;
  reused_ = connected.reused;
  if (connection_ == nullptr) {
    // The caller is still inside Start: report from the event loop.
    timer_.At(0, [this, refused = connected.refused] {
      Fail(refused ? absl::UnavailableError("cannot connect to the engine")
                   : absl::ResourceExhaustedError("this worker process has no free connection"));
    });
    return;
  }
  Watchdog();
}

// One timer that checks the time of the last progress, so that reads need not move it.
void Exchange::Watchdog() {
  // Engines send the head of a stream before they compute the prompt.
  const Nanos limit = !connected_ ? timeouts_.connect : body_begun_ ? timeouts_.idle : timeouts_.first_byte;
  const Nanos now = transport_.Now();
  if (paused_) last_ = now;  // the client is slow, not the engine
  if (now - last_ >= limit) {
    return Fail(absl::DeadlineExceededError(!connected_   ? "connecting to the engine timed out"
                                            : body_begun_ ? "the engine stopped inside the answer"
                                                          : "the engine did not answer in time"));
  }
  timer_.At(last_ + limit, [this] { Watchdog(); });
}

void Exchange::Cancel() {
  timer_.Cancel();
  live_ = false;
  if (void* connection = std::exchange(connection_, nullptr)) transport_.Release(connection, /*keep=*/false);
}

void Exchange::Pause(bool paused) {
  if (connection_ == nullptr || paused == paused_) return;
  paused_ = paused;
  last_ = transport_.Now();
  transport_.Pause(connection_, paused);
}

void Exchange::OnConnected() {
  connected_ = sent_ = true;
  last_ = transport_.Now();
  Watchdog();
}

void Exchange::OnData(std::string_view bytes) {
  if (!live_) return;
  answered_ = true;
  std::string body;
  const Status status = reader_.Consume(bytes, &body);
  if (body_begun_ || !body.empty()) last_ = transport_.Now();
  if (!body_begun_ && !body.empty()) {
    body_begun_ = true;
    Watchdog();
  }
  if (!head_reported_ && reader_.head_done()) {
    head_reported_ = true;
    handler_->OnHead(*this);
    if (!live_) return;
  }
  if (!body.empty()) handler_->OnBody(*this, body);
  if (!live_) return;
  if (!status.ok()) return Fail(status);
  if (!reader_.done()) return;
  timer_.Cancel();
  live_ = false;
  transport_.Release(std::exchange(connection_, nullptr), reader_.keep_alive());
  handler_->OnEnd(*this);
}

bool Exchange::RetryFresh() {
  // An engine may close an idle connection at the moment at which it is used again: the request was not read.
  if (!reused_ || answered_ || connection_ == nullptr) return false;
  transport_.Release(std::exchange(connection_, nullptr), /*keep=*/false);
  Connect(/*reuse=*/false);
  return true;
}

void Exchange::OnClosed() {
  if (!live_ || RetryFresh()) return;
  const Status status = reader_.Close();
  if (!status.ok()) return Fail(status);
  Cancel();
  handler_->OnEnd(*this);
}

void Exchange::OnFailed(std::string_view reason) {
  if (!live_ || RetryFresh()) return;
  Fail(absl::UnavailableError(fmt::format("connection to the engine failed: {}", reason)));
}

void Exchange::OnException(std::string_view what) {
  if (live_) Fail(ResourceExhausted("{}", what));
}

void Exchange::Fail(const Status& status) {
  Cancel();
  handler_->OnError(*this, status);
}

}  // namespace moesaic::proxy
