// One API call on its way through an endpoint.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "server/api_error.h"
#include "server/generation.h"
#include "server/http.h"
#include "server/json_fields.h"
#include "server/tracing.h"

namespace moesaic::server {

struct Call {
  HttpRequest request;
  std::shared_ptr<ResponseWriter> writer;
  std::shared_ptr<Lane> lane;
  TraceContext trace;
  std::string client;                                 // whom to be fair to: a key's digest, or the address
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
Status CountTokens(const GenerationContext& context, Call& call);
Status Tokenize(const GenerationContext& context, Call& call);
Status Detokenize(const GenerationContext& context, Call& call);
Status RenderChat(const GenerationContext& context, Call& call);

/// Copies what every endpoint has in common into `spec`.
void SetCommon(const Call& call, GenerationSpec* spec);

}  // namespace moesaic::server
