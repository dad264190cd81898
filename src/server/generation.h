// One request on its way: several choices of one or more prompts run in the engine, and what they say comes
// out parsed, piece by piece.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "server/api_error.h"
#include "server/http.h"
#include "server/json_fields.h"
#include "server/live_requests.h"
#include "server/metrics.h"
#include "server/response_store.h"
#include "server/served_model.h"
#include "server/structured.h"
#include "server/tracing.h"
#include "text/grammar_pool.h"
#include "text/tool_calls.h"

namespace moesaic::server {

class AnswerStops;
struct Tenant;

struct GenerationSpec {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<int> budgets;  // [prompts] longest output
  int n = 1;                 // choices of each prompt; choice p * n + i is the i-th of prompt p
  engine::SamplingParams sampling;
  bool prompt_logprobs = false;
  std::vector<std::string> stop;
  bool include_stop = false;
  bool skip_special = true;
  std::optional<GrammarText> grammar;
  ApiStyle style = ApiStyle::kOpenAi;  // of errors before the answer begins
  text::ToolFormat tools = text::ToolFormat::kNone;
  std::string tools_json;
  text::ReasoningFormat reasoning = text::ReasoningFormat::kNone;
  bool in_reasoning = false;
  std::string cache_namespace;
  std::string client;
  std::shared_ptr<Tenant> tenant;  // charged for tokens; null: nobody
  engine::SessionNote session;
  int priority = 0;
  std::optional<engine::RequestSparsity> sparsity;
  std::optional<engine::Clock::time_point> deadline;
  std::string id;  // of the answer
  TraceContext trace;
};

struct GeneratedToken {
  int32_t id = 0;
  engine::LogprobEntry logprobs;
};

/// The stop string or id that ended a choice, or "deadline".
using StopCause = std::variant<std::monostate, std::string, int32_t>;

/// What one or more tokens of one choice settled.
struct ChoiceDelta {
  int choice = 0;
  std::string reasoning, content;
  std::vector<text::ToolCallDelta> calls;             // the first piece of a call has its id
  std::vector<GeneratedToken> tokens;                 // since the delta before; their text may come later
  std::vector<engine::LogprobEntry> prompt_logprobs;  // in the first delta, when asked for
  std::string finish_reason;                          // OpenAI's; empty while the choice goes on
  StopCause stop_cause;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of them, found in the cache
  int64_t completion_tokens = 0;
  int64_t reasoning_tokens = 0;  // of them, thoughts
};

/// Takes what comes out, on the request's lane.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  /// The engine has taken the request: a stream's head can go out.
  virtual void Started() {}
  virtual void Delta(ChoiceDelta delta, const Usage& so_far) = 0;
  virtual void Done(const Usage& usage) = 0;
  virtual void Failed(const ApiError& error) = 0;
};

/// What requests run on; outlives them.
struct GenerationContext {
  const ServedModel& model;
  Metrics& metrics;
  Tracer& tracer;
  LiveRequests& live;
  ResponseStore& responses;
  text::GrammarPool& grammars;
  AnswerStops* stops = nullptr;  // ends the answer at the drain deadline; null: nothing does
};

/// Compiles the grammar if there is one, submits the choices and delivers to `sink` on `lane`; runs on `lane`
/// itself. When the client leaves, all is cancelled. A refusal comes back as a status, or, after the grammar,
/// is sent to `writer`; in both cases `sink` is not told.
Status StartGeneration(const GenerationContext& context, GenerationSpec spec,
                       const std::shared_ptr<Lane>& lane, const std::shared_ptr<ResponseWriter>& writer,
                       std::unique_ptr<AnswerSink> sink);

/// "chatcmpl-" and its like with 32 random hexadecimal digits behind.
std::string NewId(const char* prefix);

}  // namespace moesaic::server
