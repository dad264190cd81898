// Implements POST /v1/chat/completions.
#include <algorithm>
#include <limits>
#include <utility>

#include "server/chat_prompt.h"
#include "server/openai_stream.h"

namespace moesaic::server {
namespace {

// Fields of the request that the answer needs.
struct ChatShape : OpenAiShape {
  int choices = 1;
  int top_logprobs = -1;  // -1: no logprobs
  bool named_call = false;
  std::vector<int32_t> prompt_ids;  // set when the request returns token ids
};

// A call that the request names is not the model's decision. OpenAI ends it with "stop".
std::string FinishOf(const ChatShape& shape, const std::string& reason) {
  return shape.named_call && reason == "tool_calls" ? "stop" : reason;
}

class ChatWhole : public AnswerSink {
 public:
  ChatWhole(ChatShape shape, const text::Tokenizer& tokenizer, std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)),
        tokenizer_(tokenizer),
        writer_(std::move(writer)),
        choices_(shape_.choices) {}

  void Delta(ChoiceDelta delta, const Usage&) override {
    AnsweredChoice& choice = choices_[delta.choice];
    choice.Add(std::move(delta));
  }
  void Failed(const ApiError& error) override { writer_->Send(ErrorResponse(error, ApiStyle::kOpenAi)); }

  void Done(const Usage& usage) override {
    Json list = Json::array();
    for (size_t i = 0; i < choices_.size(); ++i) list.push_back(ChoiceJson(static_cast<int>(i)));
    Json answer = AnswerHead(shape_, "chat.completion");
    answer["choices"] = std::move(list);
    answer["usage"] = UsageJson(usage);
    answer["service_tier"] = nullptr;
    answer["system_fingerprint"] = nullptr;
    if (shape_.ids) answer["prompt_token_ids"] = shape_.prompt_ids;
    SendJson(*writer_, answer);
  }

 private:
  Json ChoiceJson(int index) const {
    const AnsweredChoice& choice = choices_[index];
    Json message = {{"role", "assistant"}, {"content", choice.content}, {"refusal", nullptr}};
    if (choice.content.empty() && !choice.calls.empty()) message["content"] = nullptr;
    if (!choice.reasoning.empty()) message["reasoning_content"] = choice.reasoning;
    if (!choice.calls.empty()) message["tool_calls"] = CallsJson(choice.calls);
    Json json = {{"index", index}, {"message", std::move(message)}};
    json["logprobs"] =
        shape_.top_logprobs < 0 ? Json() : ChatLogprobs(tokenizer_, choice.tokens, shape_.top_logprobs);
    json["finish_reason"] = FinishOf(shape_, choice.finish_reason);
    json["stop_reason"] = StopReasonJson(choice.stop_cause);
    if (shape_.ids) json["token_ids"] = TokenIds(choice.tokens);
    return json;
  }

  const ChatShape shape_;
  const text::Tokenizer& tokenizer_;
  const std::shared_ptr<ResponseWriter> writer_;
  std::vector<AnsweredChoice> choices_;
};

class ChatStream : public OpenAiStream {
 public:
  ChatStream(ChatShape shape, const text::Tokenizer& tokenizer, std::shared_ptr<ResponseWriter> writer)
      : OpenAiStream(shape_, "chat.completion.chunk", std::move(writer)),
        shape_(std::move(shape)),
        tokenizer_(tokenizer),
        begun_(shape_.choices) {}

  void Delta(ChoiceDelta delta, const Usage& so_far) override {
    Json said = Json::object();
    if (!begun_[delta.choice]) {
      begun_[delta.choice] = true;
      Json first = {{"role", "assistant"}, {"content", ""}};
      Chunk(delta.choice, std::move(first), nullptr, {}, so_far, /*first=*/true);
    }
    if (!delta.reasoning.empty()) said["reasoning_content"] = delta.reasoning;
    if (!delta.content.empty()) said["content"] = delta.content;
    if (!delta.calls.empty()) said["tool_calls"] = CallPieces(delta.calls);
    if (said.empty() && delta.finish_reason.empty()) return;
    Chunk(delta.choice, std::move(said), &delta, delta.tokens, so_far, /*first=*/false);
  }

 private:
  static Json CallPieces(const std::vector<text::ToolCallDelta>& calls) {
    Json pieces = Json::array();
    for (const text::ToolCallDelta& call : calls) {
      // Joins pieces of the same call in one chunk.
      if (call.name.empty() && !pieces.empty() && pieces.back()["index"] == call.index) {
        Json& arguments = pieces.back()["function"]["arguments"];
        arguments = arguments.get<std::string>() + call.arguments;
        continue;
      }
      Json piece = {{"index", call.index}};
      if (!call.name.empty()) {
        piece["id"] = call.id;
        piece["type"] = "function";
        piece["function"]["name"] = call.name;
      }
      piece["function"]["arguments"] = call.arguments;
      pieces.push_back(std::move(piece));
    }
    return pieces;
  }

  void Chunk(int index, Json said, const ChoiceDelta* delta, const std::vector<GeneratedToken>& tokens,
             const Usage& so_far, bool first) {
    Json choice = {
        {"index", index}, {"delta", std::move(said)}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
    if (delta != nullptr && shape_.top_logprobs >= 0) {
      choice["logprobs"] = ChatLogprobs(tokenizer_, tokens, shape_.top_logprobs);
    }
    if (delta != nullptr && !delta->finish_reason.empty()) {
      choice["finish_reason"] = FinishOf(shape_, delta->finish_reason);
      choice["stop_reason"] = StopReasonJson(delta->stop_cause);
    }
    if (shape_.ids && !first) choice["token_ids"] = TokenIds(tokens);
    SendChunk(std::move(choice), so_far,
              shape_.ids && first ? Json{{"prompt_token_ids", shape_.prompt_ids}} : Json());
  }

  const ChatShape shape_;
  const text::Tokenizer& tokenizer_;
  std::vector<bool> begun_;
};

// Reads "logprobs", which is a boolean in chats, and "top_logprobs", which needs it.
int ReadLogprobs(Fields& body) {
  bool wanted = false;
  int top = 0;
  body.Bool("logprobs", &wanted);
  body.Int("top_logprobs", 0, kMaxLogprobs, &top);
  if (body.ok() && body.Has("top_logprobs") && top > 0 && !wanted) {
    body.Fail("top_logprobs", "invalid_value", "'top_logprobs' needs 'logprobs': true");
  }
  return wanted ? top : -1;
}

}  // namespace

Status ChatCompletions(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  GenerationFields fields = ReadGeneration(body, context.model);
  const Conversation conversation = ReadConversation(body);
  const int logprobs = ReadLogprobs(body);
  std::optional<GrammarText> grammar = ReadStructured(body);
  if (body.Has("max_completion_tokens")) {
    int most = 0;
    body.Int("max_completion_tokens", 1, std::numeric_limits<int>::max(), &most);
    fields.max_tokens = most;
  }
  if (body.ok() && fields.max_tokens == 0) {
    body.Fail("max_tokens", "invalid_value", "Invalid 'max_tokens': at least 1, found 0");
  }
  RETURN_IF_ERROR(body.status());
  ASSIGN_OR_RETURN(Prompt prompt, RenderPrompt(context.model, conversation));
  ASSIGN_OR_RETURN(const int budget, OutputBudget(context.model, prompt.ids.size(), fields.max_tokens,
                                                  context.model.default_output, "messages"));
  ASSIGN_OR_RETURN(std::optional<GrammarText> forced, ForcedCalls(context.model, conversation));
  if (forced) grammar = std::move(forced);

  ChatShape shape;
  shape.id = NewId("chatcmpl-");
  shape.model = context.model.names.front();
  shape.choices = fields.n;
  shape.top_logprobs = logprobs;
  shape.usage = fields.stream_usage;
  shape.continuous = fields.stream_usage_continuous;
  shape.ids = fields.return_token_ids;
  shape.named_call = conversation.tool_use == ToolUse::kNamed;
  if (shape.ids) shape.prompt_ids = prompt.ids;

  GenerationSpec spec;
  RETURN_IF_ERROR(SetCommon(call, fields, grammar, &spec));
  spec.id = shape.id;
  spec.prompts = {std::move(prompt.ids)};
  spec.budgets = {budget};
  spec.n = fields.n;
  spec.sampling.logprobs = logprobs;
  SetTools(context.model, conversation, &spec);
  // The grammar applies to the whole answer, so that it has no reasoning.
  spec.in_reasoning = prompt.in_reasoning && !grammar;
  return StartAnswer<ChatWhole, ChatStream>(context, call, fields.stream, std::move(spec), std::move(shape));
}

}  // namespace moesaic::server
