// POST /v1/responses.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "server/answer.h"
#include "server/call.h"
#include "server/conversations.h"
#include "server/response_items.h"
#include "server/responses_request.h"

namespace moesaic::server {
namespace {

struct ResponseShape {
  std::string id = NewId("resp_");
  std::string model;
  int64_t created = UnixNow();
  Json echo;
  int top_logprobs = -1;                           // -1: none
  std::function<void(const Json& response)> keep;  // called with the whole response; may be empty
};

// Tokens of the prompt in whole blocks that were computed, and are in the cache now.
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

Json ResponseJson(const ResponseShape& shape, const char* status, Json output, Json usage, Json error) {
  Json json = {{"id", shape.id},       {"object", "response"},       {"created_at", shape.created},
               {"status", status},     {"background", false},        {"error", std::move(error)},
               {"model", shape.model}, {"output", std::move(output)}};
  json["incomplete_details"] =
      std::string(status) == "incomplete" ? Json{{"reason", "max_output_tokens"}} : Json();
  for (const auto& [key, value] : shape.echo.items()) json[key] = value;
  json["usage"] = std::move(usage);
  return json;
}

Json ReasoningItem(const std::string& id, const std::string& text, const char* status) {
  Json content = Json::array();
  if (!text.empty()) content.push_back({{"type", "reasoning_text"}, {"text", text}});
  return {{"id", id},
          {"type", "reasoning"},
          {"summary", Json::array()},
          {"content", std::move(content)},
          {"status", status}};
}

Json TextPart(const std::string& text, Json logprobs) {
  return {{"type", "output_text"},
          {"text", text},
          {"annotations", Json::array()},
          {"logprobs", std::move(logprobs)}};
}

Json MessageItem(const std::string& id, Json content, const char* status) {
  return {{"id", id},
          {"type", "message"},
          {"status", status},
          {"role", "assistant"},
          {"content", std::move(content)}};
}

Json CallItem(const std::string& id, const AnsweredCall& call, const char* status) {
  return {{"id", id},           {"type", "function_call"}, {"status", status},
          {"call_id", call.id}, {"name", call.name},       {"arguments", call.arguments}};
}

Json Logprobs(const ResponseShape& shape, const text::Tokenizer& tokenizer,
              const std::vector<GeneratedToken>& tokens) {
  if (shape.top_logprobs < 0) return Json::array();
  return ChatLogprobs(tokenizer, tokens, shape.top_logprobs)["content"];
}

const char* StatusOf(const std::string& finish_reason) {
  return finish_reason == "length" ? "incomplete" : "completed";
}

class ResponseWhole : public AnswerSink {
 public:
  ResponseWhole(ResponseShape shape, const text::Tokenizer& tokenizer, std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)), tokenizer_(tokenizer), writer_(std::move(writer)) {}

  void Delta(ChoiceDelta delta, const Usage&) override { answer_.Add(std::move(delta)); }
  void Failed(const ApiError& error) override { writer_->Send(ErrorResponse(error, ApiStyle::kOpenAi)); }

  void Done(const Usage& usage) override {
    const char* status = StatusOf(answer_.finish_reason);
    Json output = Json::array();
    if (!answer_.reasoning.empty()) output.push_back(ReasoningItem(NewId("rs_"), answer_.reasoning, status));
    if (!answer_.content.empty() || answer_.calls.empty()) {
      Json part = TextPart(answer_.content, Logprobs(shape_, tokenizer_, answer_.tokens));
      output.push_back(MessageItem(NewId("msg_"), Json::array({std::move(part)}), status));
    }
    for (const AnsweredCall& call : answer_.calls) output.push_back(CallItem(NewId("fc_"), call, status));
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

// Output items come one after another: a thought, a message, calls.
class ResponseStream : public AnswerSink {
 public:
  ResponseStream(ResponseShape shape, const text::Tokenizer& tokenizer,
                 std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)), tokenizer_(tokenizer), stream_(std::move(writer)) {}

  void Started() override {
    stream_.Begin();
    Json response = ResponseJson(shape_, "in_progress", Json::array(), nullptr, nullptr);
    Event("response.created", {{"response", response}});
    Event("response.in_progress", {{"response", std::move(response)}});
  }

  void Delta(ChoiceDelta delta, const Usage&) override {
    if (!delta.reasoning.empty()) {
      Open(Item::kReasoning, "rs_");
      text_ += delta.reasoning;
      Event("response.reasoning_text.delta", Placed({{"delta", delta.reasoning}}));
    }
    if (!delta.content.empty()) {
      Open(Item::kMessage, "msg_");
      text_ += delta.content;
      Json logprobs = Logprobs(shape_, tokenizer_, delta.tokens);
      for (const Json& entry : logprobs) logprobs_.push_back(entry);
      Event("response.output_text.delta",
            Placed({{"delta", delta.content}, {"logprobs", std::move(logprobs)}}));
    }
    for (const text::ToolCallDelta& call : delta.calls) {
      if (!call.name.empty()) {
        Close("completed");
        call_ = {call.id, call.name, ""};
        Open(Item::kCall, "fc_");
      }
      if (call.arguments.empty()) continue;
      call_.arguments += call.arguments;
      Event("response.function_call_arguments.delta",
            {{"item_id", item_id_}, {"output_index", output_.size()}, {"delta", call.arguments}});
    }
    if (!delta.finish_reason.empty()) finish_reason_ = delta.finish_reason;
  }

  void Done(const Usage& usage) override {
    const std::string status = StatusOf(finish_reason_);
    Close(status.c_str());
    const Json response = ResponseJson(shape_, status.c_str(), output_, ResponseUsage(usage), nullptr);
    if (shape_.keep) shape_.keep(response);
    Event(("response." + status).c_str(), {{"response", response}});
    stream_.End();
  }

  void Failed(const ApiError& error) override {
    Close("incomplete");
    Json reason = {{"code", "server_error"}, {"message", error.message}};
    Event("response.failed",
          {{"response", ResponseJson(shape_, "failed", output_, nullptr, std::move(reason))}});
    stream_.End();
  }

 private:
  enum class Item { kNone, kReasoning, kMessage, kCall };

  void Event(const char* type, Json members) {
    Json event = {{"type", type}, {"sequence_number", sequence_++}};
    for (auto& [key, value] : members.items()) event[key] = std::move(value);
    stream_.Event(type, event);
  }

  Json Placed(Json members) const {
    Json placed = {{"item_id", item_id_}, {"output_index", output_.size()}, {"content_index", 0}};
    for (auto& [key, value] : members.items()) placed[key] = value;
    return placed;
  }

  Json ItemJson(const char* status) const {
    switch (open_) {
      case Item::kReasoning:
        return ReasoningItem(item_id_, text_, status);
      case Item::kCall:
        return CallItem(item_id_, call_, status);
      default:
        return MessageItem(
            item_id_,
            std::string(status) == "in_progress" ? Json::array() : Json::array({TextPart(text_, logprobs_)}),
            status);
    }
  }

  void Open(Item item, const char* prefix) {
    if (open_ == item && item != Item::kCall) return;
    Close("completed");
    open_ = item;
    item_id_ = NewId(prefix);
    text_.clear();
    logprobs_ = Json::array();
    Event("response.output_item.added",
          {{"output_index", output_.size()}, {"item", ItemJson("in_progress")}});
    if (item == Item::kMessage)
      Event("response.content_part.added", Placed({{"part", TextPart("", Json::array())}}));
    if (item == Item::kReasoning) {
      Event("response.content_part.added", Placed({{"part", {{"type", "reasoning_text"}, {"text", ""}}}}));
    }
  }

  void Close(const char* status) {
    if (open_ == Item::kNone) return;
    if (open_ == Item::kMessage) {
      Event("response.output_text.done", Placed({{"text", text_}, {"logprobs", logprobs_}}));
      Event("response.content_part.done", Placed({{"part", TextPart(text_, logprobs_)}}));
    } else if (open_ == Item::kReasoning) {
      Event("response.reasoning_text.done", Placed({{"text", text_}}));
      Event("response.content_part.done", Placed({{"part", {{"type", "reasoning_text"}, {"text", text_}}}}));
    } else {
      Event("response.function_call_arguments.done", {{"item_id", item_id_},
                                                      {"output_index", output_.size()},
                                                      {"name", call_.name},
                                                      {"arguments", call_.arguments}});
    }
    Json item = ItemJson(status);
    Event("response.output_item.done", {{"output_index", output_.size()}, {"item", item}});
    output_.push_back(std::move(item));
    open_ = Item::kNone;
  }

  const ResponseShape shape_;
  const text::Tokenizer& tokenizer_;
  EventStream stream_;
  Json output_ = Json::array();
  Json logprobs_ = Json::array();
  Item open_ = Item::kNone;
  std::string item_id_, text_, finish_reason_;
  AnsweredCall call_;
  int64_t sequence_ = 0;
};

// The id of the conversation that a request belongs to; empty: none. Clients send the id or {"id": ...}.
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

// The messages so far: those of the kept response that "previous_response_id" names, or of `conversation`.
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
    if (!previous || previous->response["object"] != "response") {
      return FieldError("previous_response_id", "previous_response_not_found",
                        fmt::format("Previous response with id '{}' not found.", id));
    }
    messages = std::move(previous->messages);
  }
  return messages;
}

// Adds a request's items and its response's to a conversation.
std::function<void(const Json&)> Continuer(const GenerationContext& context, const Call& call,
                                           const std::string& id, Json items) {
  return
      [&store = context.responses, owner = call.owner, id, items = std::move(items)](const Json& response) {
        const auto updated = store.Update(id, owner, [&](StoredResponse& stored) {
          for (const Json& item : items) stored.messages.push_back(item);
          for (const Json& item : response["output"]) stored.messages.push_back(item);
          return true;
        });
        if (updated == ResponseStore::Updated::kYes) return;
        spdlog::warn("conversation {}: a response could not be added, since the conversation {}", id,
                     updated == ResponseStore::Updated::kUnknown ? "was deleted" : "is too large to keep");
      };
}

// Keeps a response together with the conversation that it ends.
std::function<void(const Json&)> Keeper(const GenerationContext& context, const Call& call, Json messages) {
  return [&store = context.responses, owner = call.owner,
          messages = std::move(messages)](const Json& response) mutable {
    if (!AppendItems(response["output"], "output", &messages).ok()) return;  // all are our own
    store.Add({response["id"].get<std::string>(), owner, response, std::move(messages)});
  };
}

std::string IdIn(const Call& call) {
  return call.request.path.substr(std::string_view("/v1/responses/").size());
}

Status NoResponse(const std::string& id) { return NotFound("Response with id '{}' not found.", id); }

}  // namespace

Status GetResponse(const GenerationContext& context, Call& call) {
  const auto found = context.responses.Find(IdIn(call), call.owner);
  if (!found || found->response["object"] != "response") return NoResponse(IdIn(call));
  SendJson(*call.writer, found->response);
  return OkStatus();
}

Status DeleteResponse(const GenerationContext& context, Call& call) {
  const auto found = context.responses.Find(IdIn(call), call.owner);
  if (!found || found->response["object"] != "response") return NoResponse(IdIn(call));
  context.responses.Remove(IdIn(call), call.owner);
  SendJson(*call.writer, {{"id", IdIn(call)}, {"object", "response"}, {"deleted", true}});
  return OkStatus();
}

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
                                                  std::numeric_limits<int>::max(), "input"));
  ASSIGN_OR_RETURN(std::optional<GrammarText> forced, ForcedCalls(context.model, request.conversation));
  if (forced) request.grammar = std::move(forced);

  ResponseShape shape;
  shape.model = context.model.names.front();
  shape.echo = std::move(request.echo);
  shape.echo["store"] = request.store && context.responses.keeps();
  if (shape.echo["store"].get<bool>()) {
    Json messages = request.conversation.messages;
    const Json* instructions = body.Any("instructions");
    if (instructions != nullptr && !instructions->get_ref<const std::string&>().empty()) {
      messages.erase(0);  // they are this request's only
    }
    shape.keep = Keeper(context, call, std::move(messages));
  }
  if (!conversation.empty()) {
    ASSIGN_OR_RETURN(Json items, InputItems(json.value("input", Json())));
    shape.keep = [keep = std::move(shape.keep),
                  add = Continuer(context, call, conversation, std::move(items))](const Json& response) {
      if (keep) keep(response);
      add(response);
    };
  }
  shape.top_logprobs = request.logprobs || request.top_logprobs > 0 ? request.top_logprobs : -1;

  GenerationSpec spec;
  SetCommon(call, fields, request.grammar, &spec);
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
