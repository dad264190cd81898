// Choices put together from their pieces, and the parts of answers that several endpoints share.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/generation.h"
#include "server/json_fields.h"
#include "text/tokenizer.h"

namespace moesaic::server {

struct AnsweredCall {
  std::string id, name, arguments;
};

struct AnsweredChoice {
  std::string reasoning, content;
  std::vector<AnsweredCall> calls;
  std::vector<GeneratedToken> tokens;
  std::vector<engine::LogprobEntry> prompt_logprobs;
  std::string finish_reason;
  StopCause stop_cause;

  void Add(ChoiceDelta delta);
};

/// OpenAI's "usage" object.
Json UsageJson(const Usage& usage);
/// vLLM's "stop_reason".
Json StopReasonJson(const StopCause& cause);
/// The ids of `tokens`.
Json TokenIds(const std::vector<GeneratedToken>& tokens);
/// OpenAI's chat "logprobs" of `tokens`, with the `top` likeliest of each.
Json ChatLogprobs(const text::Tokenizer& tokenizer, const std::vector<GeneratedToken>& tokens, int top);
/// A token's text; bytes that are no UTF-8 alone are replaced.
std::string TokenText(const text::Tokenizer& tokenizer, int32_t id);
/// Seconds since 1970.
int64_t UnixNow();
/// OpenAI's "tool_calls" of a message.
Json CallsJson(const std::vector<AnsweredCall>& calls);

}  // namespace moesaic::server
