// One API call on its way through an endpoint.
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
  std::shared_ptr<Lane> lane;
  TraceContext trace;
  std::string client;              // whom to be fair to: a key's holder, or the address
  std::string owner;               // whose what is kept is; empty where no keys are set
  std::shared_ptr<Tenant> tenant;  // holder of the request's key; null: it came without
  std::string cache_scope;         // tenant whose cached blocks it uses; empty: shared ones
  bool admin = false;              // may see what concerns others
  std::optional<engine::Clock::time_point> deadline;  // by which it must be answered
  ApiStyle style = ApiStyle::kOpenAi;
};

void SendJson(ResponseWriter& writer, const Json& json);
void SendError(ResponseWriter& writer, const Status& status, ApiStyle style);

/// Server-sent events of one answer.
class EventStream {
 public:
  explicit EventStream(std::shared_ptr<ResponseWriter> writer) : writer_(std::move(writer)) {}
  void Begin();
  /// An event without a name, as OpenAI's chat has it.
  void Data(const Json& json);
  /// A named event, as Anthropic has it and OpenAI's responses.
  void Event(const std::string& name, const Json& json);
  /// "data: [DONE]".
  void Done();
  void End() { writer_->End(); }

 private:
  std::shared_ptr<ResponseWriter> writer_;
};

/// The endpoints that generate. Each checks the body, starts a generation, and answers in its API's shape.
Status ChatCompletions(const GenerationContext& context, Call& call);
Status Completions(const GenerationContext& context, Call& call);
Status Responses(const GenerationContext& context, Call& call);
Status Messages(const GenerationContext& context, Call& call);
Status Embeddings(const GenerationContext& context, Call& call);

/// The endpoints that answer at once.
Status GetResponse(const GenerationContext& context, Call& call);
Status DeleteResponse(const GenerationContext& context, Call& call);
Status ListInputItems(const GenerationContext& context, Call& call);
Status CancelResponse(const GenerationContext& context, Call& call);
Status CountInputTokens(const GenerationContext& context, Call& call);
Status CountTokens(const GenerationContext& context, Call& call);
Status Tokenize(const GenerationContext& context, Call& call);
Status Detokenize(const GenerationContext& context, Call& call);
Status RenderChat(const GenerationContext& context, Call& call);

/// Moves what the generating endpoints have in common into `spec`: the call's own, what `fields` say, and
/// `grammar`, which is compiled when the generation starts, if there is one.
void SetCommon(const Call& call, GenerationFields& fields, const std::optional<GrammarText>& grammar,
               GenerationSpec* spec);

/// Makes `spec` find the conversation's calls and the model's thoughts.
void SetTools(const ServedModel& model, const Conversation& conversation, GenerationSpec* spec);

/// Starts the generation; `Stream` or `Whole` tells the client, as the request wants it. Both are made of the
/// answer's shape, the tokenizer and the writer.
template <typename Whole, typename Stream, typename Shape>
Status StartAnswer(const GenerationContext& context, const Call& call, bool stream, GenerationSpec spec,
                   Shape shape) {
  std::unique_ptr<AnswerSink> sink;
  if (stream) {
    sink = std::make_unique<Stream>(std::move(shape), context.model.tokenizer, call.writer);
  } else {
    sink = std::make_unique<Whole>(std::move(shape), context.model.tokenizer, call.writer);
  }
  return StartGeneration(context, std::move(spec), call.lane, call.writer, std::move(sink));
}

}  // namespace moesaic::server
