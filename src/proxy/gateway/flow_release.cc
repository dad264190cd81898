// The end of a request: its exchanges, the KV blocks that P holds for it, its slot.
#include <memory>
#include <utility>

#include "proxy/gateway/flow.h"
#include "proxy/gateway/gateway.h"

namespace moesaic::proxy {
namespace {

// Reads the rest of P's answer, which names blocks that no decode engine fetches now.
class AbandonedPrefill : public DrainHandler {
 public:
  AbandonedPrefill(Gateway& gateway, KvRelease release, std::string body)
      : DrainHandler(gateway), release_(std::move(release)), body_(std::move(body)) {}
  void Read(std::string_view bytes) override {
    if (body_.size() + bytes.size() <= kMaxPrefillAnswer) body_.append(bytes);
  }

 private:
  void Ended(Exchange& exchange) override {
    const StatusOr<PrefillAnswer> answer = ReadPrefillAnswer(body_);
    if (exchange.response().status() >= 400 || !answer.ok() || answer->transfer_params.empty()) return;
    gateway_.ReleaseKv(release_, answer->transfer_params);
  }

  KvRelease release_;
  std::string body_;
};

}  // namespace

KvRelease Flow::ReleaseOf() const {
  return {.endpoint = body_->endpoint,
          .target = request_.target,
          .body = request_.body,
          .headers = HeadersForEngines(),
          .hold = hold_,
          .prefill = prefill_instance_,
          .strip = !gateway_.settings().client_transfer};
}

bool Flow::KvMayBeFetched() const {
  if (answer_ == nullptr || !answer_->sent()) return false;
  const ResponseReader& response = answer_->response();
  const bool refused = response.head_done() && response.status() >= 400 && response.status() < 500;
  return !refused;
}

// Ends the exchanges by the rules of the transfer. An engine that computes for this request after its end
// keeps the charge: the request's slot lives as long as that exchange.
void Flow::DropExchanges() {
  const Transfer transfer = gateway_.settings().transfer;
  const bool answered = answer_ != nullptr && !answer_->live() && stream_ != nullptr && stream_->saw_end();
  if (transfer == Transfer::kVllmNixl && !preparing_ && body_) {
    // P holds the blocks until a decode engine fetches them. One that has the request tells P when it is
    // cancelled, and after one that failed they may be another request's blocks; without one, another must
    // fetch them.
    const bool aborted = log_.outcome == Outcome::kAborted;
    if (prefill_ != nullptr && prefill_->live() && (aborted || prefill_->answered())) {
      gateway_.Drain(std::move(prefill_),
                     std::make_unique<AbandonedPrefill>(gateway_, ReleaseOf(), std::move(prefill_body_)),
                     TakeHeld());
    } else if (!params_.empty() && !KvMayBeFetched()) {
      gateway_.ReleaseKv(ReleaseOf(), params_);
    } else if (!params_.empty() && aborted && body_->stream && answer_ != nullptr && !head_sent_) {
      // The first byte of the body shows that D has fetched the blocks.
      gateway_.Drain(std::move(answer_), std::make_unique<DrainHandler>(gateway_, /*until_first_byte=*/true),
                     TakeHeld());
    }
  }
  // SGLang's P still sends its blocks when D has answered: it must come to its end.
  if (prefill_ != nullptr && (answered || log_.outcome == Outcome::kCompleted))
    gateway_.Drain(std::move(prefill_), nullptr, {.body = hold_, .id = {}});
  gateway_.DestroyLater(std::move(prefill_));
  gateway_.DestroyLater(std::move(answer_));
  gateway_.DestroyLater(std::move(query_));
}

// Passes the slot on to an exchange that outlives the request.
Drainage Flow::TakeHeld() {
  return {.body = hold_, .id = std::exchange(id_, RequestId{}), .outcome = log_.outcome};
}

// Leaves all stages.
void Flow::Complete(Outcome outcome) {
  if (phase_ == Phase::kDone) return;
  phase_ = Phase::kDone;
  timer_.Cancel();
  estimate_.Cancel();
  log_.outcome = outcome;
  log_.request_id = request_id_;
  log_.key_name = key_name_;
  const auto url_of = [this](int instance) {
    const EngineSettings* engine = gateway_.Engine(instance);
    return engine == nullptr ? std::string() : engine->instance.url;
  };
  log_.prefill = url_of(prefill_instance_);
  log_.decode = url_of(AnsweringInstance());
  if (id_) {
    if (const std::optional<RequestRecord> record = gateway_.state().Request(id_)) {
      log_.entered = record->entered;
      log_.first_token = record->first_token;
      log_.last_token = record->last_token;
      log_.output_tokens = record->output_tokens;
      log_.retries = record->retries;
      if (log_.cached_tokens == 0) log_.cached_tokens = record->cached_tokens;
    }
    log_.entered[static_cast<size_t>(Stage::kDone)] = gateway_.now();
    gateway_.board().AddEnded({.worker = gateway_.worker(),
                               .slot = id_.slot,
                               .prompt_tokens = static_cast<uint32_t>(log_.prompt_tokens),
                               .output_tokens = static_cast<uint32_t>(log_.output_tokens),
                               .entered = log_.entered});
    gateway_.Unregister(id_);
  }
  DropExchanges();
  if (id_) {
    gateway_.state().Finish(std::exchange(id_, RequestId{}), outcome, gateway_.now());
    gateway_.ScheduleSoon();
  }
  hold_.reset();
  if (std::exchange(passing_, false)) gateway_.ReturnPass();
  if (client_ == nullptr && !preparing_) gateway_.Reap(*this);
}

}  // namespace moesaic::proxy
