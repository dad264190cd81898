// Implements /tokenize, /detokenize, /v1/chat/completions/render and /v1/messages/count_tokens.
#include <algorithm>
#include <utility>

#include "server/answer.h"
#include "server/anthropic_prompt.h"
#include "server/call.h"
#include "server/chat_prompt.h"

namespace moesaic::server {
namespace {

// Maximum bytes of a text that /tokenize takes even if it exceeds the context, for clients that divide texts.
constexpr size_t kAnyContext = 1 << 20;
// Likewise for /detokenize, in ids. The longest tokens have about 128 bytes, so that the text has at most 16
// MiB.
constexpr size_t kAnyContextIds = 128 << 10;

Status CheckModel(Fields& body, const ServedModel& model) {
  std::string name;
  body.String("model", &name);
  RETURN_IF_ERROR(body.status());
  return model.CheckName(name);
}

}  // namespace

Status Tokenize(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  RETURN_IF_ERROR(CheckModel(body, context.model));
  std::string prompt;
  bool special = true, spellings = false;
  body.String("prompt", &prompt);
  body.Bool("add_special_tokens", &special);
  body.Bool("return_token_strs", &spellings);
  std::vector<int32_t> ids;
  if (body.Has("messages")) {
    const Conversation conversation = ReadConversation(body);
    RETURN_IF_ERROR(body.status());
    ASSIGN_OR_RETURN(Prompt rendered, RenderPrompt(context.model, conversation));
    ids = std::move(rendered.ids);
  } else {
    if (body.ok() && !body.Has("prompt")) {
      body.Fail("prompt", "missing_required_parameter",
                "Missing required parameter: 'prompt' or 'messages'.");
    }
    RETURN_IF_ERROR(body.status());
    ASSIGN_OR_RETURN(ids, prompt.size() > kAnyContext ? context.model.Encode(prompt, special, "prompt")
                                                      : context.model.tokenizer.Encode(prompt, special));
  }
  Json answer = {{"count", ids.size()}, {"max_model_len", context.model.max_context}};
  answer["tokens"] = ids;  // not in the list above, which would copy it
  answer["token_strs"] = nullptr;
  if (spellings) {
    answer["token_strs"] = Json::array();
    for (const int32_t id : ids) answer["token_strs"].push_back(context.model.tokenizer.IdToToken(id));
  }
  SendJson(*call.writer, answer);
  return OkStatus();
}

Status Detokenize(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  RETURN_IF_ERROR(CheckModel(body, context.model));
  const Json* tokens = body.Array("tokens");
  if (body.ok() && tokens == nullptr) {
    body.Fail("tokens", "missing_required_parameter", "Missing required parameter: 'tokens'.");
  }
  RETURN_IF_ERROR(body.status());
  const size_t most = std::max(kAnyContextIds, static_cast<size_t>(context.model.max_context));
  if (tokens->size() > most) {
    return FieldError("tokens", "array_above_max_length",
                      fmt::format("Invalid 'tokens': at most {} of them, found {}", most, tokens->size()));
  }
  std::vector<int32_t> ids;
  for (size_t i = 0; i < tokens->size(); ++i) {
    const Json& token = (*tokens)[i];
    const std::string path = fmt::format("tokens[{}]", i);
    if (!token.is_number_integer()) return TypeError(path, "an integer", token);
    if (token < 0 || token >= context.model.vocab_size) {
      return FieldError(
          path, "invalid_value",
          fmt::format("Invalid '{}': ids below {}, found {}", path, context.model.vocab_size, token.dump()));
    }
    ids.push_back(token.get<int32_t>());
  }
  ASSIGN_OR_RETURN(const std::string text, context.model.tokenizer.Decode(ids, /*skip_special=*/false));
  SendJson(*call.writer, {{"prompt", text}});
  return OkStatus();
}

Status RenderChat(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  RETURN_IF_ERROR(CheckModel(body, context.model));
  const Conversation conversation = ReadConversation(body);
  RETURN_IF_ERROR(body.status());
  ASSIGN_OR_RETURN(const Prompt prompt, RenderPrompt(context.model, conversation));
  SendJson(*call.writer, {{"prompt", prompt.text},
                          {"prompt_token_ids", prompt.ids},
                          {"count", prompt.ids.size()},
                          {"max_model_len", context.model.max_context}});
  return OkStatus();
}

Status CountTokens(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  RETURN_IF_ERROR(CheckModel(body, context.model));
  const Conversation conversation = ReadMessages(body);
  RETURN_IF_ERROR(body.status());
  ASSIGN_OR_RETURN(const Prompt prompt, RenderPrompt(context.model, conversation));
  SendJson(*call.writer, {{"input_tokens", prompt.ids.size()}});
  return OkStatus();
}

}  // namespace moesaic::server
