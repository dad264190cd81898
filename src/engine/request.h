// Requests to the engine, and the events that answer them.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cache/eviction.h"
#include "engine/sparsity.h"
#include "text/grammar.h"

namespace moesaic::engine {

using Clock = std::chrono::steady_clock;
using RequestId = uint64_t;  ///< Rises with arrival.

/// Parameters of drawing tokens. Defaults are those of the OpenAI API: temperature 1, no cuts.
struct SamplingParams {
  float temperature = 1.0f;         ///< 0 (below 1e-5): greedy
  int top_k = 0;                    ///< 0: off
  float top_p = 1.0f;               ///< (0, 1]
  float min_p = 0.0f;               ///< [0, 1]
  float typical_p = 1.0f;           ///< (0, 1]: keeps the tokens closest to the expected information; 1: off
  float repetition_penalty = 1.0f;  ///< over prompt and output, as in Hugging Face
  float presence_penalty = 0.0f;    ///< over output, as in the OpenAI API
  float frequency_penalty = 0.0f;
  std::vector<std::pair<int32_t, float>> logit_bias = {};  ///< added to the token's logit, [-100, 100]
  std::optional<uint64_t> seed;  ///< Equal seeds give equal tokens in any batch; absent: the engine's choice.
  int max_tokens = 16;           ///< 0: only computes the prompt (for prompt_logprobs)
  int min_tokens = 0;            ///< Number of tokens before which no end-of-sequence or stop id is drawn.
  bool ignore_eos = false;       ///< EngineOptions::eos_ids do not end the request.
  std::vector<int32_t> stop_ids;  ///< end the request; not part of the output
  int logprobs = -1;              ///< -1: none; k >= 0: of the drawn token and the top k
};

/// A client's statement about its conversation, for the cost-aware eviction policy. The policy keeps blocks
/// of a session that continues longer than others, the longest those that return soonest. It first evicts
/// blocks after `tokens` and blocks of a session that ends, unless other requests used them, too.
struct SessionNote {
  cache::Session state = cache::Session::kNone;
  /// Number of leading tokens, output included, that will be used again if the session continues.
  int64_t tokens = std::numeric_limits<int64_t>::max();
  double returns_in = 0;  ///< Seconds from the request's end until then; 0: unknown.
};

struct Request {
  std::vector<int32_t> prompt;  ///< Not empty; all ids are in the vocabulary.
  SamplingParams sampling;
  /// Requests the logprob of each prompt token from the second on, and the top `logprobs`.
  bool prompt_logprobs = false;
  /// Cached blocks are shared only between requests of one namespace (tenant's salt, adapter).
  std::string cache_namespace = {};
  /// Applied when the request ends for any reason.
  SessionNote session = {};
  int priority = 0;  ///< lower runs first
  /// Time at which the request ends with kDeadline. Requests of one client and priority are admitted in the
  /// order of their deadlines.
  std::optional<Clock::time_point> deadline = std::nullopt;
  std::string client = {};  ///< Clients of one priority share the engine evenly.
  /// Grammar of the output, owned by this request; null: none.
  std::shared_ptr<text::Grammar> grammar = nullptr;
  /// Settings of block sparsity; absent: the engine's default.
  std::optional<RequestSparsity> sparsity = std::nullopt;
  /// Requests the last prompt token's final hidden state, scaled to length 1; needs max_tokens 0.
  bool want_embedding = false;
};

struct TokenLogprob {
  int32_t token;
  float logprob;
};

/// A token's log-probability under the model's own distribution: the log-softmax of the unmodified logits,
/// before penalties, temperature and cuts (vLLM's "raw_logprobs").
struct LogprobEntry {
  float logprob = 0;
  std::vector<TokenLogprob> top;  // descending; ties by lower id
};

enum class FinishReason {
  kNone,
  kStop,    ///< an end-of-sequence or stop id was drawn
  kLength,  ///< max_tokens was reached, or the context or the whole KV cache is full
  kCancelled,
  kDeadline,  ///< its deadline passed
  kGrammar,   ///< its grammar allows no token, or exceeds its CPU time
  kError,     ///< the model failed or gave no finite logits
  kInternal,  ///< an error of the engine
};

/// Times at which a request reached its stages; absent: not reached.
struct RequestTimes {
  Clock::time_point queued = {};
  std::optional<Clock::time_point> started;      ///< first admitted
  std::optional<Clock::time_point> first_token;  ///< or end of the prompt if no token is drawn
};

/// A new token of a request, or its end. Each added request gets exactly one event whose `finish` is not
/// kNone.
struct TokenEvent {
  RequestId request = 0;
  std::optional<int32_t> token;  ///< absent at an end without a token (stopped, cancelled, max_tokens 0)
  LogprobEntry logprobs;         ///< valid if there is a token and logprobs >= 0
  FinishReason finish = FinishReason::kNone;
  Status status = OkStatus();         ///< reason of kGrammar, kError and kInternal
  std::optional<int32_t> stopped_by;  ///< the id that ended it, with kStop
  /// [prompt.size() - 1] for the tokens from the second on, in the first event, if requested.
  std::vector<LogprobEntry> prompt_logprobs;
  int cached_tokens = 0;         ///< prompt tokens found in the cache; in the first event
  std::vector<float> embedding;  ///< [hidden_size], if requested
  RequestTimes times = {};
};

}  // namespace moesaic::engine
