// Runs one request in the engine: several choices of one or more prompts, whose parsed text goes to a sink
// piece by piece.
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
  std::vector<int> budgets;  // [prompts] maximum tokens of an output
  int n = 1;                 // number of choices of each prompt; choice p * n + i is the i-th of prompt p
  engine::SamplingParams sampling;
  bool prompt_logprobs = false;
  std::vector<std::string> stop;
  bool include_stop = false;
  bool skip_special = true;
  std::optional<GrammarText> grammar;
  ApiStyle style = ApiStyle::kOpenAi;  // form of errors before the answer begins
  text::ToolFormat tools = text::ToolFormat::kNone;
  std::string tools_json;
  bool parallel_calls = true;  // false: calls after the first are left out
  text::ReasoningFormat reasoning = text::ReasoningFormat::kNone;
  bool in_reasoning = false;
  std::string cache_namespace;
  std::string client;
  std::shared_ptr<Tenant> tenant;  // holder whose limits the tokens count for; null without a key
  engine::SessionNote session;
  int priority = 0;
  std::optional<engine::RequestSparsity> sparsity;
  std::optional<engine::Clock::time_point> deadline;
  std::string id;  // id of the answer
  TraceContext trace;
};

struct GeneratedToken {
  int32_t id = 0;
  engine::LogprobEntry logprobs;
};

/// The stop string or id that ended a choice.
using StopCause = std::variant<std::monostate, std::string, int32_t>;

/// Text and tool calls that one or more tokens of one choice complete.
struct ChoiceDelta {
  int choice = 0;
  std::string reasoning, content;
  std::vector<text::ToolCallDelta> calls;             // pieces of calls; the first of a call has its id
  std::vector<GeneratedToken> tokens;                 // since the last delta; their text may follow later
  std::vector<engine::LogprobEntry> prompt_logprobs;  // in the first delta, when the request needs them
  std::string finish_reason;                          // OpenAI's or "deadline"; empty until the choice ends
  StopCause stop_cause;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // number of the prompt tokens that were in the cache
  int64_t completion_tokens = 0;
  int64_t reasoning_tokens = 0;  // number of the completion tokens that are reasoning
};

/// Receives the output of a generation, on the request's executor.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  /// The engine has accepted the request, so that a stream can send its head.
  virtual void Started() {}
  virtual void Delta(ChoiceDelta delta, const Usage& so_far) = 0;
  virtual void Done(const Usage& usage) = 0;
  virtual void Failed(const ApiError& error) = 0;
};

/// Parts of the server that a generation needs. They outlive it.
struct GenerationContext {
  const ServedModel& model;
  Metrics& metrics;
  Tracer& tracer;
  LiveRequests& live;
  ResponseStore& responses;
  text::GrammarPool& grammars;
  AnswerStops* stops = nullptr;  // ends answers at the drain deadline; may be null
};

/// Compiles the grammar, if there is one, submits the choices and delivers their output to `sink` on
/// `executor`. Call it on `executor`. Cancels the choices when the client leaves. Returns a refusal as a
/// status, or sends it to `writer` when the grammar was compiled before; `sink` gets no call in both cases.
Status StartGeneration(const GenerationContext& context, GenerationSpec spec,
                       const std::shared_ptr<SerialExecutor>& executor,
                       const std::shared_ptr<ResponseWriter>& writer, std::unique_ptr<AnswerSink> sink);

/// Returns the client's error for an end with kError or kInternal, and ok for other ends.
Status FailureOf(const engine::TokenEvent& event);

/// Returns `prefix`, e.g. "chatcmpl-", followed by 32 random hexadecimal digits.
std::string NewId(const char* prefix);

}  // namespace moesaic::server
