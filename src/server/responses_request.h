// Reads a request of OpenAI's Responses API.
#pragma once

#include <optional>
#include <string>

#include "server/chat_prompt.h"
#include "server/sampling_fields.h"
#include "server/structured.h"

namespace moesaic::server {

struct ResponsesRequest {
  GenerationFields generation;
  Conversation conversation;
  std::optional<GrammarText> grammar;
  int top_logprobs = 0;
  bool logprobs = false;  // true if "include" names logprobs
  bool store = true;
  Json echo;  // members of the request that the response repeats
};

/// Reads the body. `history` has the messages before this request: an array, or null.
ResponsesRequest ReadResponses(Fields& body, const ServedModel& model, const Json& history);

/// Converts items of "input" or "output" to messages and appends them.
Status AppendItems(const Json& items, const std::string& path, Json* messages);

}  // namespace moesaic::server
