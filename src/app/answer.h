// Produces one answer of a chat on the terminal, token by token.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/model_text.h"
#include "base/status.h"
#include "engine/engine.h"

namespace moesaic::app {

struct Answer {
  std::string text;
  int prompt_tokens = 0, tokens = 0;
  double first_token_seconds = 0;  // time to first token, from the request
  double decode_seconds = 0;       // from the first token to the last
  bool interrupted = false;        // by Ctrl-C; `text` holds the output so far
  bool cut = false;                // ended by max_tokens or the context
};

/// Streams the answer to stdout and ends it with a newline.
StatusOr<Answer> WriteAnswer(engine::Engine& engine, const ModelText& text, std::vector<int32_t> prompt,
                             const engine::SamplingParams& sampling, const std::vector<std::string>& stops);

/// Returns "25 tokens, 0.42 s to the first of 118 prompt tokens, 31.2 tokens/s".
std::string SpeedLine(const Answer& answer);

}  // namespace moesaic::app
