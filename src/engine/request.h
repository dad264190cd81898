// What a caller asks of the engine and what it gets back, token by token.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moesaic::engine {

using RequestId = uint64_t;

/// How the next token is drawn. Defaults are greedy-free: temperature 1, nothing cut off, as the OpenAI API has it.
struct SamplingParams {
  float temperature = 1.0f;      ///< 0: greedy
  int top_k = 0;                 ///< 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  ///< over prompt and output, as Hugging Face has it
  float presence_penalty = 0.0f;    ///< over output, as OpenAI has it
  float frequency_penalty = 0.0f;
  std::optional<uint64_t> seed;     ///< same seed, same tokens, whatever else is in the batch
  int max_tokens = 16;
  int min_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> stop_ids;    ///< end the request; not part of the output
  int logprobs = -1;                ///< -1: none; k >= 0: the drawn token's and the top k's
};

struct Request {
  std::vector<int32_t> prompt;  ///< not empty, every id inside the vocabulary
  SamplingParams sampling;
  bool prompt_logprobs = false;  ///< logprob of each prompt token from the second on
};

struct TokenLogprob {
  int32_t token;
  float logprob;
};

enum class FinishReason { kNone, kStop, kLength, kCancelled };

/// One new token of one request, or its end.
struct TokenEvent {
  RequestId request;
  std::optional<int32_t> token;           ///< absent in a bare end (cancelled, stopped before any token)
  float logprob = 0;                      ///< valid when logprobs >= 0
  std::vector<TokenLogprob> top_logprobs;
  FinishReason finish = FinishReason::kNone;
};

}  // namespace moesaic::engine
