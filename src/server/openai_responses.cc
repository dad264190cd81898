// Implements POST /v1/responses.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "server/answer.h"
#include "server/call.h"
#include "server/conversations.h"
#include "server/response_events.h"
#include "server/response_items.h"
#include "server/responses_request.h"

namespace moesaic::server {
namespace {

// Counts the prompt tokens in complete blocks that were computed for this response and added to the cache.
int64_t CacheWriteTokens(const Usage& usage) {
  const int64_t whole = usage.prompt_tokens / tensor::kKvBlockTokens * tensor::kKvBlockTokens;
  return std::max<int64_t>(0, whole - usage.cached_tokens);
}

Json ResponseUsage(const Usage& usage) {
  return {{"input_tokens", usage.prompt_tokens},
          {"input_tokens_details",
           {{"cached_tokens", usage.cached_tokens}, {"cache_write_tokens", CacheWriteTokens(usage)}}},
          {"output_tokens", usage.completion_tokens},
          {"output_tokens_details", {{"reasoning_tokens", usage.reasoning_tokens}}},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens}};
}

Json Logprobs(const ResponseShape& shape, const text::Tokenizer& tokenizer,
              const std::vector<GeneratedToken>& tokens) {
  if (shape.top_logprobs < 0) return Json::array();
  return ChatLogprobs(tokenizer, tokens, shape.top_logprobs)["content"];
}

ResponseStatus StatusOf(const std::string& finish_reason) {
  if (finish_reason == "length") return {"incomplete", "max_output_tokens"};
  if (finish_reason == "deadline") return {"incomplete", "deadline"};
  return {"completed"};
}

class ResponseWhole : public AnswerSink {
 public:
  ResponseWhole(ResponseShape shape, const text::Tokenizer& tokenizer, std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)), tokenizer_(tokenizer), writer_(std::move(writer)) {}

  void Delta(ChoiceDelta delta, const Usage&) override { answer_.Add(std::move(delta)); }
  void Failed(const ApiError& error) override { writer_->Send(ErrorResponse(error, ApiStyle::kOpenAi)); }

  void Done(const Usage& usage) override {
    const ResponseStatus status = StatusOf(answer_.finish_reason);
    Json output = Json::array();
    if (!answer_.reasoning.empty()) {
      output.push_back(ReasoningItem(NewId("rs_"), answer_.reasoning, status.name));
    }
    if (!answer_.content.empty() || answer_.calls.empty()) {
      Json part = TextPart(answer_.content, Logprobs(shape_, tokenizer_, answer_.tokens));
      output.push_back(MessageItem(NewId("msg_"), Json::array({std::move(part)}), status.name));
    }
    for (const AnsweredCall& call : answer_.calls) {
      output.push_back(CallItem(NewId("fc_"), call, status.name));
    }
    const Json response = ResponseJson(shape_, status, std::move(output), ResponseUsage(usage), nullptr);
    if (shape_.keep) shape_.keep(response);
    SendJson(*writer_, response);
  }

 private:
  const ResponseShape shape_;
  const text::Tokenizer& tokenizer_;
  const std::shared_ptr<ResponseWriter> writer_;
  AnsweredChoice answer_;
};

class ResponseStream : public AnswerSink {
 public:
  ResponseStream(ResponseShape shape, const text::Tokenizer& tokenizer,
                 std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)), tokenizer_(tokenizer), events_(std::move(writer)) {}

  void Started() override {
    events_.Begin();
    Json response = ResponseJson(shape_, {"in_progress"}, Json::array(), nullptr, nullptr);
    events_.Event("response.created", {{"response", response}});
    events_.Event("response.in_progress", {{"response", std::move(response)}});
  }

  void Delta(ChoiceDelta delta, const Usage&) override {
    if (!delta.reasoning.empty()) {
      Open(Item::kReasoning, "rs_");
      events_.Text(delta.reasoning, Json::array());
    }
    if (!delta.content.empty()) {
      Open(Item::kMessage, "msg_");
      events_.Text(delta.content, Logprobs(shape_, tokenizer_, delta.tokens));
    }
    for (const text::ToolCallDelta& call : delta.calls) {
      if (!call.name.empty()) events_.OpenCall(NewId("fc_"), {call.id, call.name, ""});
      if (!call.arguments.empty()) events_.Arguments(call.arguments);
    }
    if (!delta.finish_reason.empty()) finish_reason_ = delta.finish_reason;
  }

  void Done(const Usage& usage) override {
    const ResponseStatus status = StatusOf(finish_reason_);
    events_.Close(status.name);
    const Json response = ResponseJson(shape_, status, events_.output(), ResponseUsage(usage), nullptr);
    if (shape_.keep) shape_.keep(response);
    events_.Event(std::string("response.") + status.name, {{"response", response}});
    events_.End();
  }

  void Failed(const ApiError& error) override {
    events_.Close("incomplete");
    Json reason = {{"code", "server_error"}, {"message", error.message}};
    events_.Event(
        "response.failed",
        {{"response", ResponseJson(shape_, {"failed"}, events_.output(), nullptr, std::move(reason))}});
    events_.End();
  }

 private:
  using Item = ResponseEvents::Item;

  void Open(Item item, const char* prefix) {
    if (events_.open() != item) events_.Open(item, NewId(prefix));
  }

  const ResponseShape shape_;
  const text::Tokenizer& tokenizer_;
  ResponseEvents events_;
  std::string finish_reason_;
};

// Returns the id of the request's conversation, or "". Clients send the id or {"id": ...}.
std::string ConversationOf(Fields& body) {
  std::string id;
  const Json* conversation = body.Any("conversation");
  if (conversation != nullptr && conversation->is_object()) {
    Fields fields(*conversation, "conversation");
    fields.String("id", &id);
    if (fields.ok() && id.empty()) {
      fields.Fail("id", "missing_required_parameter", "Missing required parameter: 'conversation.id'.");
    }
    body.Merge(fields.status());
  } else {
    body.String("conversation", &id);
  }
  if (!id.empty() && body.Has("previous_response_id")) {
    body.Fail("conversation", "mutually_exclusive_parameters",
              "'conversation' and 'previous_response_id' exclude each other");
  }
  return id;
}

// Returns the messages before this request: those of the stored response that "previous_response_id" names,
// or those of `conversation`.
StatusOr<Json> HistoryOf(const GenerationContext& context, const Call& call, Fields& body,
                         const std::string& conversation) {
  std::string id;
  body.String("previous_response_id", &id);
  RETURN_IF_ERROR(body.status());
  Json messages = Json::array();
  if (!conversation.empty()) {
    ASSIGN_OR_RETURN(const Json items, ConversationItems(context, call, conversation));
    RETURN_IF_ERROR(AppendItems(items, "conversation", &messages));
  } else if (!id.empty()) {
    auto previous = context.responses.Find(id, call.owner);
    if (!previous || previous->is_conversation) {
      return FieldError("previous_response_id", "previous_response_not_found",
                        fmt::format("Previous response with id '{}' not found.", id));
    }
    messages = std::move(previous->messages);
  }
  return messages;
}

// Appends the request's items and the response's to a conversation.
std::function<void(const Json&)> Continuer(const GenerationContext& context, const Call& call,
                                           const std::string& id, Json items) {
  return [&store = context.responses, owner = call.owner, id,
          items = std::move(items)](const Json& response) mutable {
    for (const Json& item : response["output"]) items.push_back(item);
    const auto appended = store.Append(id, owner, items);
    if (appended == ResponseStore::Updated::kYes) return;
    spdlog::warn("conversation {}: dropped a response, since the conversation {}", id,
                 appended == ResponseStore::Updated::kUnknown ? "was deleted" : "is too large to be stored");
  };
}

// Stores a response with its input and the messages up to its end.
std::function<void(const Json&)> Keeper(const GenerationContext& context, const Call& call, Json messages,
                                        Json input) {
  return [&store = context.responses, owner = call.owner, messages = std::move(messages),
          input = std::move(input)](const Json& response) mutable {
    // AppendItems refuses none of these items, since the server wrote them.
    if (!AppendItems(response["output"], "output", &messages).ok()) return;
    const auto id = response["id"].get<std::string>();
    if (!store.Add({.id = id,
                    .owner = owner,
                    .response = response,
                    .messages = std::move(messages),
                    .input = std::move(input)})) {
      spdlog::info("response {} is not stored: it needs more than 16 MiB or --stored-responses-memory", id);
    }
  };
}

}  // namespace

Status CountInputTokens(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  ASSIGN_OR_RETURN(const Json history, HistoryOf(context, call, body, ConversationOf(body)));
  const ResponsesRequest request = ReadResponses(body, context.model, history);
  RETURN_IF_ERROR(body.status());
  ASSIGN_OR_RETURN(const Prompt prompt, RenderPrompt(context.model, request.conversation));
  SendJson(*call.writer, {{"object", "response.input_tokens"}, {"input_tokens", prompt.ids.size()}});
  return OkStatus();
}

Status Responses(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  const std::string conversation = ConversationOf(body);
  ASSIGN_OR_RETURN(const Json history, HistoryOf(context, call, body, conversation));
  ResponsesRequest request = ReadResponses(body, context.model, history);
  RETURN_IF_ERROR(body.status());
  GenerationFields& fields = request.generation;
  ASSIGN_OR_RETURN(Prompt prompt, RenderPrompt(context.model, request.conversation));
  ASSIGN_OR_RETURN(const int budget, OutputBudget(context.model, prompt.ids.size(), fields.max_tokens,
                                                  context.model.default_output, "input"));
  ASSIGN_OR_RETURN(std::optional<GrammarText> forced, ForcedCalls(context.model, request.conversation));
  if (forced) request.grammar = std::move(forced);

  ASSIGN_OR_RETURN(Json input, InputItems(json.value("input", Json())));

  ResponseShape shape;
  shape.model = context.model.names.front();
  shape.echo = std::move(request.echo);
  shape.echo["store"] = request.store && context.responses.keeps();
  if (shape.echo["store"].get<bool>()) {
    Json messages = request.conversation.messages;
    const Json* instructions = body.Any("instructions");
    if (instructions != nullptr && !instructions->get_ref<const std::string&>().empty()) {
      messages.erase(0);  // the instructions are for this request only
    }
    shape.keep = Keeper(context, call, std::move(messages), input);
  }
  if (!conversation.empty()) {
    shape.keep =
        [keep = std::move(shape.keep),
         add = Continuer(context, call, conversation, std::move(input))](const Json& response) mutable {
          if (keep) keep(response);
          add(response);
        };
  }
  shape.top_logprobs = request.logprobs || request.top_logprobs > 0 ? request.top_logprobs : -1;

  GenerationSpec spec;
  RETURN_IF_ERROR(SetCommon(call, fields, request.grammar, &spec));
  spec.id = shape.id;
  spec.prompts = {std::move(prompt.ids)};
  spec.budgets = {budget};
  spec.sampling.logprobs = shape.top_logprobs;
  SetTools(context.model, request.conversation, &spec);
  spec.in_reasoning = prompt.in_reasoning && !request.grammar;
  return StartAnswer<ResponseWhole, ResponseStream>(context, call, fields.stream, std::move(spec),
                                                    std::move(shape));
}

}  // namespace moesaic::server
