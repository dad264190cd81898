// Assembles choices from their deltas, and builds the parts of answers that several endpoints share.
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

/// Returns OpenAI's "usage" object.
Json UsageJson(const Usage& usage);
/// Returns vLLM's "stop_reason".
Json StopReasonJson(const StopCause& cause);
/// Returns the ids of `tokens`.
Json TokenIds(const std::vector<GeneratedToken>& tokens);
/// Returns OpenAI's chat "logprobs" of `tokens`, with the `top` likeliest tokens at each position.
Json ChatLogprobs(const text::Tokenizer& tokenizer, const std::vector<GeneratedToken>& tokens, int top);
/// Returns a token's text. Dump replaces bytes that are not valid UTF-8 by themselves.
std::string TokenText(const text::Tokenizer& tokenizer, int32_t id);
/// Returns the seconds since 1970.
int64_t UnixNow();
/// Returns OpenAI's "tool_calls" of a message.
Json CallsJson(const std::vector<AnsweredCall>& calls);

}  // namespace moesaic::server
