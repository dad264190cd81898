#include "server/call.h"

#include <fmt/format.h>

#include <utility>

#include "server/api_keys.h"

namespace moesaic::server {

void SendJson(ResponseWriter& writer, const Json& json) { SendDumped(writer, Dump(json)); }

void SendDumped(ResponseWriter& writer, std::string text) {
  writer.Send({.status = 200, .headers = {{"content-type", "application/json"}}, .body = std::move(text)});
}

void SendError(ResponseWriter& writer, const Status& status, ApiStyle style) {
  writer.Send(ErrorResponse(ErrorOf(status), style));
}

void EventStream::Begin() {
  // Proxies that buffer answers would delay the events.
  writer_->Start(200, {{"content-type", "text/event-stream; charset=utf-8"},
                       {"cache-control", "no-cache"},
                       {"x-accel-buffering", "no"}});
}

void EventStream::Data(const Json& json) { writer_->Write(fmt::format("data: {}\n\n", Dump(json))); }

void EventStream::Event(const std::string& name, const Json& json) {
  writer_->Write(fmt::format("event: {}\ndata: {}\n\n", name, Dump(json)));
}

void EventStream::Done() { writer_->Write("data: [DONE]\n\n"); }

Status SetCommon(const Call& call, GenerationFields& fields, const std::optional<GrammarText>& grammar,
                 GenerationSpec* spec) {
  // The engine serves a lower value before all others, of all keys.
  if (fields.priority < 0 && !call.admin) {
    return FieldError(
        "priority", "invalid_value",
        fmt::format("Invalid 'priority': only an admin key may set it below 0, found {}", fields.priority));
  }
  spec->trace = call.trace;
  spec->client = call.client;
  spec->deadline = call.deadline;
  spec->sampling = std::move(fields.sampling);
  spec->stop = std::move(fields.stop);
  spec->include_stop = fields.include_stop;
  spec->skip_special = fields.skip_special;
  spec->cache_namespace = CacheNamespace(call.cache_scope, std::move(fields.cache_salt));
  spec->tenant = call.tenant;
  spec->session = fields.session;
  spec->priority = fields.priority;
  spec->sparsity = fields.sparsity;
  spec->style = call.style;
  spec->grammar = grammar;
  return OkStatus();
}

void SetTools(const ServedModel& model, const Conversation& conversation, GenerationSpec* spec) {
  if (conversation.tool_use != ToolUse::kNone) {
    spec->tools = model.tools;
    spec->tools_json = Dump(conversation.tools);
    spec->parallel_calls = conversation.parallel_calls;
  }
  spec->reasoning = model.reasoning;
}

}  // namespace moesaic::server
