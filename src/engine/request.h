// What a caller asks of the engine and what it gets back, token by token.
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

/// How the next token is drawn. Defaults are greedy-free: temperature 1, nothing cut off, as the OpenAI API
/// has it.
struct SamplingParams {
  float temperature = 1.0f;         ///< 0 (below 1e-5): greedy
  int top_k = 0;                    ///< 0: off
  float top_p = 1.0f;               ///< (0, 1]
  float min_p = 0.0f;               ///< [0, 1]
  float typical_p = 1.0f;           ///< (0, 1]: keeps the tokens nearest to the expected information; 1: off
  float repetition_penalty = 1.0f;  ///< over prompt and output, as Hugging Face has it
  float presence_penalty = 0.0f;    ///< over output, as OpenAI has it
  float frequency_penalty = 0.0f;
  std::vector<std::pair<int32_t, float>> logit_bias = {};  ///< added to the token's logit, [-100, 100]
  std::optional<uint64_t>
      seed;  ///< same seed, same tokens, whatever else is in the batch; absent: the engine's choice
  int max_tokens = 16;            ///< 0: only reads the prompt (for prompt_logprobs)
  int min_tokens = 0;             ///< no end-of-sequence or stop id is drawn before
  bool ignore_eos = false;        ///< EngineOptions::eos_ids are tokens like others
  std::vector<int32_t> stop_ids;  ///< end the request; not part of the output
  int logprobs = -1;              ///< -1: none; k >= 0: the drawn token's and the top k's
};

/// What a client knows of its conversation. The cost-aware policy keeps blocks of one that continues longer,
/// and those longest that return soonest. It lets those go first that stand behind `tokens`, and those of one
/// that ends, unless others used them too.
struct SessionNote {
  cache::Session state = cache::Session::kNone;
  /// Of one that continues: so many of the request's first tokens, its output counted, will be asked for
  /// again.
  int64_t tokens = std::numeric_limits<int64_t>::max();
  double returns_in = 0;  ///< seconds from the request's end until they are; 0: not known
};

struct Request {
  std::vector<int32_t> prompt;  ///< not empty, every id inside the vocabulary
  SamplingParams sampling;
  bool prompt_logprobs =
      false;  ///< logprob of each prompt token from the second on, and the top k of `logprobs`
  /// Cached blocks are shared only between requests of one namespace (tenant's salt, adapter).
  std::string cache_namespace = {};
  /// Counts however the request ends, cancelled or with max_tokens 0 as well.
  SessionNote session = {};
  int priority = 0;  ///< lower runs first
  /// Ends the request with kDeadline when it passes; earlier ones of a client go first.
  std::optional<Clock::time_point> deadline = std::nullopt;
  std::string client = {};  ///< who asks: clients of one priority share the engine evenly
  /// The output follows this grammar; the request's own. Null: free.
  std::shared_ptr<text::Grammar> grammar = nullptr;
  /// Which rows choose the blocks that they read; absent: the engine's default.
  std::optional<RequestSparsity> sparsity = std::nullopt;
  /// Asks for the last prompt token's final hidden state, scaled to length 1; needs max_tokens 0.
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
  std::vector<TokenLogprob> top;  // falling; ties to the lower id
};

enum class FinishReason {
  kNone,
  kStop,    ///< an end-of-sequence or stop id was drawn
  kLength,  ///< max_tokens, the context or the whole KV cache is full
  kCancelled,
  kDeadline,  ///< its deadline passed
  kGrammar,   ///< its grammar allows no further token, or costs too much
  kError,     ///< the model failed or gave no finite logits
  kInternal,  ///< the engine is at fault
};

/// When a request reached a stage; a stage that it has not reached is absent.
struct RequestTimes {
  Clock::time_point queued = {};
  std::optional<Clock::time_point> started;      ///< first admitted
  std::optional<Clock::time_point> first_token;  ///< or prompt read, where no token is drawn
};

/// One new token of one request, or its end. Each added request gets exactly one event whose `finish` is not
/// kNone.
struct TokenEvent {
  RequestId request = 0;
  std::optional<int32_t> token;  ///< absent in a bare end (stopped, cancelled, max_tokens 0)
  LogprobEntry logprobs;         ///< valid when a token is there and logprobs >= 0
  FinishReason finish = FinishReason::kNone;
  Status status = OkStatus();         ///< reason of kGrammar, kError and kInternal
  std::optional<int32_t> stopped_by;  ///< the id that ended it, with kStop
  /// [prompt.size() - 1], for the tokens from the second on: in the request's first event, when asked for.
  std::vector<LogprobEntry> prompt_logprobs;
  int cached_tokens = 0;         ///< of the prompt, not computed for this request; in its first event
  std::vector<float> embedding;  ///< [hidden_size], in the only event of a request that wants it
  RequestTimes times = {};
};

}  // namespace moesaic::engine
