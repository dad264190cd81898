// A request of OpenAI's Responses API, and the object that answers it.
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
  bool logprobs = false;  // "include" names them
  bool store = true;
  Json echo;  // the members of the answer that say what was asked
};

/// `history`: the messages of the conversation so far; an array, or null.
ResponsesRequest ReadResponses(Fields& body, const ServedModel& model, const Json& history);

/// Appends items, as "input" and "output" have them, as messages.
Status AppendItems(const Json& items, const std::string& path, Json* messages);

}  // namespace moesaic::server
