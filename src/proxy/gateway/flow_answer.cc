// The answer of a request: bytes from engines, failures and retries.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "proxy/gateway/flow.h"
#include "proxy/gateway/gateway.h"

namespace moesaic::proxy {
namespace {

constexpr double kRetryGrowth = 1.5, kRetryJitter = 0.2;

// Statuses by which an engine fails for one request. With 502, 503 and 504 it reports its own state.
bool MayBeOfRequest(int status) { return status >= 500 && (status < 502 || status > 504); }

// Failures of this worker process say nothing about the engine.
bool IsLocal(const Status& status) { return status.code() == StatusCode::kResourceExhausted; }

bool IsRetryable(int status) { return status == 408 || status == 429 || (status >= 500 && status != 501); }

}  // namespace

void Flow::MarkPrefillDone() {
  estimate_.Cancel();
  if (!id_ || std::exchange(prefill_done_, true)) return;
  gateway_.scheduler().PrefillDone(id_, gateway_.now());
  gateway_.ScheduleSoon();
}

void Flow::ForwardHead(const ResponseReader& response, bool length) {
  std::vector<Header> headers;
  for (const auto& [name, value] : response.headers()) {
    if ((name == "content-length" && length) || (!IsHopHeader(name) && name != "date" && name != "server")) {
      headers.push_back({name, value});
    }
  }
  if (!request_id_.empty()) headers.push_back({"x-request-id", request_id_});
  head_sent_ = true;
  client_->SendHead(response.status(), headers);
}

// Whether a second engine failed for this request with the same status: then the request causes it, and no
// engine is to blame.
bool Flow::BlamesRequest(int instance, int status) {
  if (!MayBeOfRequest(status)) return false;
  if (suspect_status_ == status) {
    suspect_instance_ = -1;
    return true;
  }
  suspect_instance_ = instance;
  suspect_status_ = status;
  return false;
}

void Flow::OnHead(Exchange& exchange) {
  if (&exchange != answer_.get()) return;
  const ResponseReader& response = exchange.response();
  const int instance = AnsweringInstance();
  const int status = response.status();
  if (phase_ == Phase::kRunning && IsRetryable(status) && !BlamesRequest(instance, status) &&
      Retry(instance, /*breaker=*/status >= 500 && !MayBeOfRequest(status))) {
    return;
  }
  // Engines send the head of a stream before they compute the prompt. Until the body begins, another engine
  // can still answer.
  if (status >= 400 || phase_ == Phase::kPassing) AcceptAnswer(response);
}

// The answer is this engine's: no retry follows.
void Flow::AcceptAnswer(const ResponseReader& response) {
  const int instance = AnsweringInstance();
  const int status = response.status();
  if (status < 500) gateway_.state().RecordSuccess(instance);
  if (status < 400 && suspect_instance_ >= 0 && suspect_instance_ != instance) {  // the request was right
    gateway_.state().RecordFailure(suspect_instance_, gateway_.now(), gateway_.settings().breaker);
  }
  pass_error_ = status >= 400;
  is_stream_ = response.Header("content-type").starts_with("text/event-stream");
  AnswerOptions options{.stream = is_stream_, .cached_tokens = std::nullopt};
  if (!pass_error_ && phase_ == Phase::kRunning) {
    options.cached_tokens = prefill_cached_;
    stream_ = std::make_unique<AnswerStream>(options);
  }
  ForwardHead(response, /*length=*/!options.cached_tokens);
}

void Flow::CountOutput() {
  if (stream_ == nullptr || !id_) return;
  const int64_t tokens = std::max(stream_->chunks(), stream_->usage().completion_tokens);
  if (tokens <= counted_) return;
  MarkPrefillDone();
  gateway_.state().AddOutput(id_, static_cast<uint32_t>(tokens - counted_), gateway_.now());
  counted_ = tokens;
}

void Flow::OnBody(Exchange& exchange, std::string_view bytes) {
  if (&exchange == query_.get()) {
    query_body_.append(bytes.substr(0, (1 << 20) - std::min<size_t>(query_body_.size(), 1 << 20)));
  } else if (&exchange == prefill_.get()) {
    if (prefill_body_.size() + bytes.size() <= kMaxPrefillAnswer) prefill_body_.append(bytes);
  } else if (&exchange == answer_.get() && client_ != nullptr) {
    if (!head_sent_) AcceptAnswer(exchange.response());
    if (stream_ == nullptr) return client_->SendBody(bytes);
    std::string out;
    stream_->Push(bytes, &out);
    if (!out.empty()) client_->SendBody(out);
    CountOutput();
  }
}

void Flow::OnEnd(Exchange& exchange) {
  if (&exchange == query_.get()) {
    // {"RANK": {"engine_id": "..."}}
    const EngineSettings* engine = gateway_.Engine(prefill_instance_);
    const uint32_t rank = engine == nullptr ? 0 : engine->instance.dp_rank;
    std::string engine_id;
    if (const auto ranks = JsonMembers::Scan(query_body_);
        ranks.ok() && exchange.response().status() == 200) {
      if (const auto entry = JsonMembers::Scan(ranks->Value(std::to_string(rank))); entry.ok()) {
        engine_id = entry->String("engine_id").value_or("");
      }
    }
    gateway_.DestroyLater(std::move(query_));
    if (engine_id.empty())
      return PrefillFailed(absl::UnavailableError("its bootstrap server named no engine"));
    gateway_.SetBootstrapId(prefill_instance_, engine_id);
    return StartPair();
  }
  if (&exchange == prefill_.get()) return PrefillEnded();
  if (&exchange != answer_.get()) return;
  if (!head_sent_) AcceptAnswer(exchange.response());
  if (stream_ != nullptr) {
    std::string out;
    stream_->Finish(&out);
    if (!out.empty()) client_->SendBody(out);
    CountOutput();
    const AnswerUsage& usage = stream_->usage();
    if (usage.prompt_tokens >= 0) {
      log_.prompt_tokens = usage.prompt_tokens;
      gateway_.state().SetPromptTokens(id_, static_cast<uint32_t>(usage.prompt_tokens));
    }
    if (usage.cached_tokens >= 0) {
      log_.cached_tokens = usage.cached_tokens;
      gateway_.state().SetCached(id_, static_cast<uint32_t>(usage.cached_tokens));
    }
  }
  client_->End(/*complete=*/true);
  Complete(pass_error_ ? Outcome::kFailed : Outcome::kCompleted);
}

void Flow::OnError(Exchange& exchange, const Status& status) {
  if (&exchange == query_.get() || &exchange == prefill_.get()) return PrefillFailed(status);
  if (&exchange == answer_.get()) AnswerFailed(status);
}

void Flow::PrefillEnded() {
  const int status = prefill_->response().status();
  const Transfer transfer = gateway_.settings().transfer;
  const Status failure = absl::UnavailableError(fmt::format("status {}", status));
  if (IsRetryable(status) && !BlamesRequest(prefill_instance_, status)) {
    return PrefillFailed(failure, /*breaker=*/status >= 500 && !MayBeOfRequest(status));
  }
  if (status < 500) gateway_.state().RecordSuccess(prefill_instance_);
  if (status >= 400) {  // the request itself is wrong: its client gets P's answer
    if (!head_sent_ && client_ != nullptr) {
      ForwardHead(prefill_->response(), /*length=*/true);
      client_->SendBody(prefill_body_);
      client_->End(/*complete=*/true);
      return Complete(Outcome::kFailed);
    }
    return PrefillFailed(failure, /*breaker=*/false);
  }
  gateway_.DestroyLater(std::move(prefill_));
  if (transfer != Transfer::kVllmNixl) return MarkPrefillDone();
  const StatusOr<PrefillAnswer> answer = ReadPrefillAnswer(prefill_body_);
  if (answer.ok()) {
    params_ = answer->transfer_params;
    if (answer->usage.cached_tokens >= 0) prefill_cached_ = answer->usage.cached_tokens;
  }
  phase_ = Phase::kQueued;  // for a decode engine; before the scheduler may place it
  MarkPrefillDone();
  Enqueue();
}

void Flow::PrefillFailed(const Status& status, bool breaker) {
  gateway_.transport().Log(true, fmt::format("{}: prefill failed: {}", request_id_, Message(status)));
  gateway_.SetBootstrapId(prefill_instance_, "");
  breaker = breaker && !IsLocal(status);
  if (head_sent_) {  // D waits for KV that will not come
    if (breaker)
      gateway_.state().RecordFailure(prefill_instance_, gateway_.now(), gateway_.settings().breaker);
    return EndAnswer("the prefill engine failed");
  }
  if (Retry(prefill_instance_, breaker)) return;
  Reply(502, "server_error", fmt::format("the prefill engine failed: {}", Message(status)));
}

void Flow::AnswerFailed(const Status& status) {
  const int instance = AnsweringInstance();
  gateway_.transport().Log(true, fmt::format("{}: engine failed: {}", request_id_, Message(status)));
  // The pair may have failed because P was restarted and has another id.
  if (prefill_instance_ >= 0) gateway_.SetBootstrapId(prefill_instance_, "");
  if (!head_sent_) {
    if (phase_ == Phase::kRunning && Retry(instance, /*breaker=*/!IsLocal(status))) return;
    const bool late = status.code() == StatusCode::kDeadlineExceeded;
    return Reply(late ? 504 : 502, "server_error", fmt::format("the engine failed: {}", Message(status)));
  }
  if (!IsLocal(status)) gateway_.state().RecordFailure(instance, gateway_.now(), gateway_.settings().breaker);
  EndAnswer("the engine failed inside the answer");
}

// Ends an answer of which bytes have left.
void Flow::EndAnswer(std::string_view message) {
  if (client_ != nullptr) {
    if (is_stream_) {
      std::string out;
      if (stream_ != nullptr) {
        stream_->Abandon(&out);
      } else {
        out = "\n\n";  // it is not known where the event ends
      }
      client_->SendBody(out + ErrorEvent(502, "server_error", message));
      client_->End(/*complete=*/true);
    } else {
      client_->End(/*complete=*/false);
    }
  }
  Complete(Outcome::kFailed);
}

// Sends the request to another engine after a delay. False: no attempt is left.
bool Flow::Retry(int failed_instance, bool breaker) {
  if (breaker) gateway_.state().RecordFailure(failed_instance, gateway_.now(), gateway_.settings().breaker);
  const std::optional<RequestRecord> record = id_ ? gateway_.state().Request(id_) : std::nullopt;
  if (!record || record->retries >= gateway_.settings().scheduler.max_retries) return false;
  estimate_.Cancel();
  stream_.reset();
  // A sequential D is replaced alone when it cannot have fetched P's blocks. P gives fetched blocks to other
  // requests, so that a second D would read their KV.
  const bool keeps_prefill = gateway_.settings().transfer == Transfer::kVllmNixl && prefill_ == nullptr &&
                             !params_.empty() && !KvMayBeFetched();
  gateway_.DestroyLater(std::move(answer_));
  gateway_.DestroyLater(std::move(query_));
  gateway_.DestroyLater(std::move(prefill_));
  if (!keeps_prefill) {
    prefill_done_ = false;
    params_.clear();
    prefill_cached_.reset();
  }
  phase_ = Phase::kRetrying;
  const double factor =
      std::pow(kRetryGrowth, attempts_++) *
      std::uniform_real_distribution<double>(1 - kRetryJitter, 1 + kRetryJitter)(gateway_.random());
  gateway_.board().retries.fetch_add(1, std::memory_order_relaxed);
  const auto delay = static_cast<Nanos>(static_cast<double>(gateway_.settings().retry_delay) * factor);
  timer_.At(gateway_.now() + delay, [this, failed_instance, keeps_prefill] {
    if (!gateway_.scheduler().Requeue(id_, failed_instance, keeps_prefill, gateway_.now())) {
      return Reply(502, "server_error", "all attempts on engines failed");
    }
    Enqueue();
  });
  return true;
}

void Flow::Reply(int status, std::string_view type, const std::string& message, Nanos retry_after) {
  if (client_ != nullptr && !head_sent_) {
    const std::string body = ErrorBody(status, type, message);
    std::vector<Header> headers = {{"content-type", "application/json"},
                                   {"content-length", std::to_string(body.size())}};
    if (retry_after > 0) {
      headers.push_back({"retry-after", std::to_string((retry_after + kSecond - 1) / kSecond)});
    }
    if (!request_id_.empty()) headers.push_back({"x-request-id", request_id_});
    head_sent_ = true;
    client_->SendHead(status, headers);
    client_->SendBody(body);
    client_->End(/*complete=*/true);
  }
  Complete(status == 429 || status == 503 ? Outcome::kRejected : Outcome::kFailed);
}

void Flow::OnException(std::string_view what) {
  gateway_.transport().Log(true, fmt::format("{}: {}", request_id_, what));
  if (phase_ == Phase::kDone) return;
  if (!head_sent_) return Reply(500, "server_error", "the proxy failed");
  if (client_ != nullptr) client_->End(/*complete=*/false);
  Complete(Outcome::kFailed);
}

FlowLog Flow::Detach() {
  client_ = nullptr;
  if (phase_ != Phase::kDone) {
    Complete(Outcome::kAborted);
  } else if (!preparing_) {
    gateway_.Reap(*this);
  }
  return log_;
}

void Flow::Pause(bool paused) {
  if (answer_ == nullptr) return;
  if (paused) gateway_.state().SkipInterval(id_);
  answer_->Pause(paused);
}

}  // namespace moesaic::proxy
