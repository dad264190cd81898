// Implements POST /v1/messages of Anthropic's API.
#include <algorithm>
#include <limits>
#include <utility>

#include "server/answer.h"
#include "server/anthropic_prompt.h"
#include "server/call.h"

namespace moesaic::server {
namespace {

struct MessageShape {
  std::string id = NewId("msg_");
  std::string model;
  int64_t prompt_tokens = 0;
};

const char* StopReason(const ChoiceDelta& end) {
  if (end.finish_reason == "tool_calls") return "tool_use";
  if (end.finish_reason == "length") return "max_tokens";
  if (end.finish_reason == "deadline") return "deadline";
  return std::holds_alternative<std::string>(end.stop_cause) ? "stop_sequence" : "end_turn";
}

Json StopSequence(const ChoiceDelta& end) {
  const auto* text = std::get_if<std::string>(&end.stop_cause);
  return end.finish_reason == "stop" && text != nullptr ? Json(*text) : Json();
}

// Anthropic counts the tokens that were read from the cache separately.
Json MessageUsage(const Usage& usage) {
  return {{"input_tokens", usage.prompt_tokens - usage.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", usage.cached_tokens},
          {"output_tokens", usage.completion_tokens}};
}

Json MessageJson(const MessageShape& shape, Json content, Json stop_reason, Json stop_sequence,
                 const Usage& usage) {
  return {{"id", shape.id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", shape.model},
          {"content", std::move(content)},
          {"stop_reason", std::move(stop_reason)},
          {"stop_sequence", std::move(stop_sequence)},
          {"usage", MessageUsage(usage)}};
}

Json InputJson(const std::string& arguments) {
  Json input = Json::parse(arguments, nullptr, /*allow_exceptions=*/false);
  return input.is_object() ? input : Json::object();
}

class MessageWhole : public AnswerSink {
 public:
  MessageWhole(MessageShape shape, const text::Tokenizer&, std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)), writer_(std::move(writer)) {}

  void Delta(ChoiceDelta delta, const Usage&) override {
    if (!delta.finish_reason.empty()) {
      end_.finish_reason = delta.finish_reason;
      end_.stop_cause = delta.stop_cause;
    }
    answer_.Add(std::move(delta));
  }
  void Failed(const ApiError& error) override { writer_->Send(ErrorResponse(error, ApiStyle::kAnthropic)); }

  void Done(const Usage& usage) override {
    Json content = Json::array();
    if (!answer_.reasoning.empty()) {
      content.push_back({{"type", "thinking"}, {"thinking", answer_.reasoning}, {"signature", ""}});
    }
    if (!answer_.content.empty()) content.push_back({{"type", "text"}, {"text", answer_.content}});
    for (const AnsweredCall& call : answer_.calls) {
      content.push_back(
          {{"type", "tool_use"}, {"id", call.id}, {"name", call.name}, {"input", InputJson(call.arguments)}});
    }
    SendJson(*writer_, MessageJson(shape_, std::move(content), StopReason(end_), StopSequence(end_), usage));
  }

 private:
  const MessageShape shape_;
  const std::shared_ptr<ResponseWriter> writer_;
  AnsweredChoice answer_;
  ChoiceDelta end_;
};

class MessageStream : public AnswerSink {
 public:
  MessageStream(MessageShape shape, const text::Tokenizer&, std::shared_ptr<ResponseWriter> writer)
      : shape_(std::move(shape)), stream_(std::move(writer)) {}

  void Started() override {
    stream_.Begin();
    const Usage usage{.prompt_tokens = shape_.prompt_tokens};
    Json message = MessageJson(shape_, Json::array(), nullptr, nullptr, usage);
    stream_.Event("message_start", {{"type", "message_start"}, {"message", std::move(message)}});
    stream_.Event("ping", {{"type", "ping"}});
  }

  void Delta(ChoiceDelta delta, const Usage&) override {
    if (!delta.reasoning.empty()) {
      Open(Block::kThinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      Piece({{"type", "thinking_delta"}, {"thinking", delta.reasoning}});
    }
    if (!delta.content.empty()) {
      Open(Block::kText, {{"type", "text"}, {"text", ""}});
      Piece({{"type", "text_delta"}, {"text", delta.content}});
    }
    for (const text::ToolCallDelta& call : delta.calls) {
      if (!call.name.empty()) {
        Close();
        Open(Block::kTool,
             {{"type", "tool_use"}, {"id", call.id}, {"name", call.name}, {"input", Json::object()}});
      }
      if (!call.arguments.empty()) Piece({{"type", "input_json_delta"}, {"partial_json", call.arguments}});
    }
    if (!delta.finish_reason.empty()) {
      end_.finish_reason = delta.finish_reason;
      end_.stop_cause = delta.stop_cause;
    }
  }

  void Done(const Usage& usage) override {
    Close();
    stream_.Event("message_delta",
                  {{"type", "message_delta"},
                   {"delta", {{"stop_reason", StopReason(end_)}, {"stop_sequence", StopSequence(end_)}}},
                   {"usage", MessageUsage(usage)}});
    stream_.Event("message_stop", {{"type", "message_stop"}});
    stream_.End();
  }

  void Failed(const ApiError& error) override {
    stream_.Event("error", Json::parse(ErrorJson(error, ApiStyle::kAnthropic)));
    stream_.End();
  }

 private:
  enum class Block { kNone, kThinking, kText, kTool };

  void Open(Block block, Json start) {
    if (open_ == block && block != Block::kTool) return;
    Close();
    open_ = block;
    stream_.Event("content_block_start",
                  {{"type", "content_block_start"}, {"index", index_}, {"content_block", std::move(start)}});
  }

  void Piece(Json piece) {
    stream_.Event("content_block_delta",
                  {{"type", "content_block_delta"}, {"index", index_}, {"delta", std::move(piece)}});
  }

  void Close() {
    if (open_ == Block::kNone) return;
    stream_.Event("content_block_stop", {{"type", "content_block_stop"}, {"index", index_}});
    ++index_;
    open_ = Block::kNone;
  }

  const MessageShape shape_;
  EventStream stream_;
  ChoiceDelta end_;
  Block open_ = Block::kNone;
  int index_ = 0;
};

// Returns true if a block of `content` has "cache_control".
bool MarksCache(const Json& content) {
  if (content.is_object()) {
    const auto found = content.find("cache_control");
    if (found != content.end() && found->is_object()) return true;
    const auto inner = content.find("content");
    return inner != content.end() && MarksCache(*inner);
  }
  return content.is_array() && std::any_of(content.begin(), content.end(), MarksCache);
}

// Fields of a request under Anthropic's names, which ReadGeneration does not read.
struct MessageFields {
  GenerationFields generation;
  int max_tokens = 0;
};

MessageFields ReadFields(Fields& body, const ServedModel& model) {
  MessageFields fields;
  fields.generation.sampling = model.defaults;
  engine::SamplingParams& sampling = fields.generation.sampling;
  std::string name;
  body.String("model", &name);
  if (body.ok()) body.Merge(model.CheckName(name));
  body.Float("temperature", 0, 1, &sampling.temperature);
  body.Float("top_p", 0, 1, &sampling.top_p);
  if (body.ok() && sampling.top_p <= 0) body.Fail("top_p", "invalid_value", "top_p: must be above 0");
  body.Int("top_k", 0, std::numeric_limits<int>::max(), &sampling.top_k);
  ReadStops(body, "stop_sequences", &fields.generation.stop);
  body.Bool("stream", &fields.generation.stream);
  if (body.ok() && !body.Has("max_tokens")) {
    body.Fail("max_tokens", "missing_required_parameter", "max_tokens: Field required");
  }
  body.Int("max_tokens", 1, std::numeric_limits<int>::max(), &fields.max_tokens);
  if (const Json* metadata = body.Object("metadata")) {
    Fields inner(*metadata, "metadata");
    std::string user;
    inner.String("user_id", &user);
    body.Merge(inner.status());
  }
  for (const char* part : {"system", "messages", "tools"}) {
    const Json* marked = body.Any(part);
    if (marked != nullptr && MarksCache(*marked)) {
      fields.generation.session.state = cache::Session::kContinues;
    }
  }
  return fields;
}

}  // namespace

Status Messages(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  MessageFields fields = ReadFields(body, context.model);
  const Conversation conversation = ReadMessages(body);
  RETURN_IF_ERROR(body.status());
  ASSIGN_OR_RETURN(Prompt prompt, RenderPrompt(context.model, conversation));
  // "max_tokens" is an upper limit: clients ask for more than the context has.
  ASSIGN_OR_RETURN(const int budget, OutputBudget(context.model, prompt.ids.size(), std::nullopt,
                                                  fields.max_tokens, "messages"));
  ASSIGN_OR_RETURN(const std::optional<GrammarText> forced, ForcedCalls(context.model, conversation));

  MessageShape shape{.model = context.model.names.front()};
  GenerationSpec spec;
  RETURN_IF_ERROR(SetCommon(call, fields.generation, forced, &spec));
  spec.id = shape.id;
  shape.prompt_tokens = static_cast<int64_t>(prompt.ids.size());
  spec.prompts = {std::move(prompt.ids)};
  spec.budgets = {budget};
  SetTools(context.model, conversation, &spec);
  spec.in_reasoning = prompt.in_reasoning && !forced;
  return StartAnswer<MessageWhole, MessageStream>(context, call, fields.generation.stream, std::move(spec),
                                                  std::move(shape));
}

}  // namespace moesaic::server
