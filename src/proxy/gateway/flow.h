// Flow: one client request on its way through the ten stages.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proxy/gateway/exchange.h"
#include "proxy/gateway/timers.h"
#include "proxy/gateway/transport.h"
#include "proxy/protocol/answer_stream.h"
#include "proxy/protocol/request_body.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {

class BodyHold;
class Gateway;
struct Drainage;
struct KvRelease;
struct RenderedPrompt;

/// Maximum bytes of P's answer that are kept.
inline constexpr size_t kMaxPrefillAnswer = 16 << 20;

/// The request of a client.
struct ClientRequest {
  std::string method, target;   ///< target: path and query as the client wrote them
  std::string path;             ///< decoded, without "." and ".."
  std::vector<Header> headers;  ///< names in lower case
  SharedBody body;              ///< not null
};

/// Facts about a request for the access log, valid after its end.
struct FlowLog {
  std::array<Nanos, kNumStages> entered{};
  Nanos first_token = 0, last_token = 0;
  std::string prefill, decode;  ///< URLs of engines; empty: none
  std::string request_id, key_name;
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  int64_t matched_tokens = 0;  ///< prompt tokens that the chosen engine holds or is expected to hold
  uint32_t retries = 0;
  bool prefill_skipped = false;
  Outcome outcome = Outcome::kFailed;
};

/// Returns whether a lower-case header belongs to one connection, or is one that the gateway writes.
bool IsHopHeader(std::string_view name);

/// Owned by the gateway. It lives until the client is detached, no thread uses it and its exchanges have
/// ended.
class Flow : public Exchange::Handler {
 public:
  Flow(Gateway& gateway, Client& client);
  ~Flow() override;

  /// Called when the whole request has arrived.
  void Start(ClientRequest request);
  /// Reads a large body, renders the prompt and computes its keys. Called in a thread; the event loop does
  /// not touch the flow meanwhile, except Detach.
  void Prepare();
  void OnPrepared();
  /// Called when Prepare ended by an exception.
  void PrepareFailed(std::string_view what) {
    (body_ ? render_status_ : read_status_) = absl::InternalError(std::string(what));
  }
  /// Called when an exception left a call. Answers 500.
  void OnException(std::string_view what);
  /// Called when the client left or its answer was sent. No calls to Client follow.
  FlowLog Detach();
  /// Called when the client's connection is slow (`paused`), and when it has drained.
  void Pause(bool paused);

  // Called by the gateway.
  void OnScheduled(const RequestRecord& record);
  /// Takes the blocks that D has for the request with this id (transfer ascend). Returns false if the id is
  /// that of another request.
  bool OnBlocks(const std::string& id, const std::string& text);
  RequestId id() const { return id_; }
  bool waiting() const { return phase_ == Phase::kQueued; }
  Nanos queued() const { return queued_; }  ///< begin of the wait
  bool finished() const { return phase_ == Phase::kDone && client_ == nullptr && !preparing_; }

  void OnHead(Exchange& exchange) override;
  void OnBody(Exchange& exchange, std::string_view bytes) override;
  void OnEnd(Exchange& exchange) override;
  void OnError(Exchange& exchange, const Status& status) override;

 private:
  enum class Phase { kNew, kPreparing, kQueued, kRunning, kRetrying, kPassing, kDone };

  void PassUnscheduled(Endpoint endpoint);
  std::vector<Header> HeadersForEngines() const;
  KvRelease ReleaseOf() const;
  /// Returns the instance whose answer the client gets.
  int AnsweringInstance() const { return decode_instance_ >= 0 ? decode_instance_ : prefill_instance_; }
  void ReadBody();
  /// Reads the body and renders its prompt. Returns false if more than `max_unknown` bytes of text must be
  /// tokenized.
  bool PrepareWithin(size_t max_unknown);
  /// Sets the tokens of the prompt, as PromptRenderer::Tokenize limits it. A later call continues.
  Status Render(size_t max_unknown);
  void RefuseBody();
  bool BlamesRequest(int instance, int status);
  void SubmitPrompt();
  void Enqueue();
  void StartPrefill();
  void StartAnswer();
  void StartPair();
  void AskBootstrap();
  std::unique_ptr<Exchange> Open(int instance, std::string_view method, std::string_view target,
                                 SharedBody body, bool once = false);
  /// Body for P of a pair, or for the answering engine.
  SharedBody BodyFor(bool prefill) const;
  void PrefillEnded();
  void PrefillFailed(const Status& status, bool breaker = true);
  void AcceptAnswer(const ResponseReader& response);
  /// The decode engine has or had P's blocks, or is reading them.
  bool KvMayBeFetched() const;
  void AnswerFailed(const Status& status);
  void EndAnswer(std::string_view message);
  bool Retry(int failed_instance, bool breaker);
  void Reply(int status, std::string_view type, const std::string& message, Nanos retry_after = 0);
  void ForwardHead(const ResponseReader& response, bool length);
  void CountOutput();
  void MarkPrefillDone();
  void Complete(Outcome outcome);
  void DropExchanges();
  Drainage TakeHeld();
  bool KeyAccepted();

  Gateway& gateway_;
  Client* client_;
  Phase phase_ = Phase::kNew;
  RequestId id_;
  Endpoint endpoint_ = Endpoint::kOther;
  ClientRequest request_;
  std::optional<RequestBody> body_;
  TransferPeers peers_;
  std::string request_id_;
  std::string key_name_;
  uint64_t tenant_ = 0;
  const ApiKey* key_ = nullptr;  // of the settings; null: no key is needed

  // Written by Prepare, read after OnPrepared; so is body_.
  bool preparing_ = false;
  bool tokens_exact_ = false;
  Status read_status_;                      // of the body
  Status render_status_;                    // of its prompt
  std::unique_ptr<RenderedPrompt> prompt_;  // until it is tokenized
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> keys_;
  std::string id_list_;  // of tokens that are forwarded

  std::unique_ptr<Exchange> prefill_, answer_, query_;
  std::string prefill_body_, query_body_;
  std::string params_;  // kv_transfer_params of P, or those that D posted
  std::optional<int64_t> prefill_cached_;
  std::unique_ptr<AnswerStream> stream_;
  bool head_sent_ = false, is_stream_ = false, pass_error_ = false, prefill_done_ = false,
       aggregated_ = false;
  std::shared_ptr<BodyHold> hold_;
  bool passing_ = false;  // counted by Gateway::TakePass
  int64_t counted_ = 0;
  uint32_t attempts_ = 0;
  // Error status of an engine's answer, until the answer of another engine shows whether the request or the
  // engine is at fault.
  int suspect_instance_ = -1, suspect_status_ = 0;
  Nanos queued_ = 0;
  std::array<Nanos, 2> waited_{};  // before it, in the queues for prefill and for decode
  int prefill_instance_ = -1, decode_instance_ = -1;
  Timer timer_;     // queue timeout, retry delay
  Timer estimate_;  // end of the prefill of an answer that does not stream
  FlowLog log_;
};

}  // namespace moesaic::proxy
