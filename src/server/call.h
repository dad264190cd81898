// One API call and the functions that its endpoints share.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/api_error.h"
#include "server/generation.h"
#include "server/http.h"
#include "server/json_fields.h"
#include "server/sampling_fields.h"
#include "server/structured.h"
#include "server/tracing.h"

namespace moesaic::server {

struct Tenant;

struct Call {
  HttpRequest request;
  std::vector<std::string> path_values;  // parts of the path that stand for {NAME} in the route
  std::shared_ptr<ResponseWriter> writer;
  std::shared_ptr<SerialExecutor> executor;
  TraceContext trace;
  std::string client;              // unit of fair scheduling: the key's holder, or the address
  std::string owner;               // owner of the responses that it stores; empty where no keys are set
  std::shared_ptr<Tenant> tenant;  // holder of the request's key; null for a request without a key
  std::string cache_scope;         // tenant whose cached blocks it uses; empty for shared blocks
  bool admin = false;              // true if it may read the data of other tenants
  std::optional<engine::Clock::time_point> deadline;  // time at which its generation ends
  ApiStyle style = ApiStyle::kOpenAi;
};

void SendJson(ResponseWriter& writer, const Json& json);
/// Sends text that Dump wrote.
void SendDumped(ResponseWriter& writer, std::string text);
void SendError(ResponseWriter& writer, const Status& status, ApiStyle style);

/// Sends the server-sent events of one answer.
class EventStream {
 public:
  explicit EventStream(std::shared_ptr<ResponseWriter> writer) : writer_(std::move(writer)) {}
  void Begin();
  /// Sends an event without a name, for OpenAI's chats and completions.
  void Data(const Json& json);
  /// Sends a named event, for Anthropic's messages and OpenAI's responses.
  void Event(const std::string& name, const Json& json);
  /// Sends "data: [DONE]".
  void Done();
  void End() { writer_->End(); }

 private:
  std::shared_ptr<ResponseWriter> writer_;
};

/// Endpoints that generate. Each checks the body, starts a generation and answers in the form of its API.
Status ChatCompletions(const GenerationContext& context, Call& call);
Status Completions(const GenerationContext& context, Call& call);
Status Responses(const GenerationContext& context, Call& call);
Status Messages(const GenerationContext& context, Call& call);
Status Embeddings(const GenerationContext& context, Call& call);

/// Endpoints that answer at once.
Status GetResponse(const GenerationContext& context, Call& call);
Status DeleteResponse(const GenerationContext& context, Call& call);
Status ListInputItems(const GenerationContext& context, Call& call);
Status CancelResponse(const GenerationContext& context, Call& call);
Status CountInputTokens(const GenerationContext& context, Call& call);
Status CountTokens(const GenerationContext& context, Call& call);
Status Tokenize(const GenerationContext& context, Call& call);
Status Detokenize(const GenerationContext& context, Call& call);
Status RenderChat(const GenerationContext& context, Call& call);

/// Moves the settings that all generating endpoints have into `spec`: those of the call, `fields`, and
/// `grammar`, which is compiled when the generation starts. Refuses a priority that the key may not have.
Status SetCommon(const Call& call, GenerationFields& fields, const std::optional<GrammarText>& grammar,
                 GenerationSpec* spec);

/// Sets the parsers of tool calls and reasoning in `spec`.
void SetTools(const ServedModel& model, const Conversation& conversation, GenerationSpec* spec);

/// Starts the generation. A `Stream` or a `Whole` sends the answer, as the request's "stream" says. Their
/// constructors take the answer's shape, the tokenizer and the writer.
template <typename Whole, typename Stream, typename Shape>
Status StartAnswer(const GenerationContext& context, const Call& call, bool stream, GenerationSpec spec,
                   Shape shape) {
  std::unique_ptr<AnswerSink> sink;
  if (stream) {
    sink = std::make_unique<Stream>(std::move(shape), context.model.tokenizer, call.writer);
  } else {
    sink = std::make_unique<Whole>(std::move(shape), context.model.tokenizer, call.writer);
  }
  return StartGeneration(context, std::move(spec), call.executor, call.writer, std::move(sink));
}

}  // namespace moesaic::server
