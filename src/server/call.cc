#include "server/call.h"

#include <fmt/format.h>

namespace moesaic::server {

void SendJson(ResponseWriter& writer, const Json& json) {
  writer.Send({.status = 200, .headers = {{"content-type", "application/json"}}, .body = Dump(json)});
}

void SendError(ResponseWriter& writer, const Status& status, ApiStyle style) {
  writer.Send(ErrorResponse(ErrorOf(status), style));
}

void EventStream::Begin() {
  // Proxies that gather answers would hold events back.
  writer_->Start(200, {{"content-type", "text/event-stream; charset=utf-8"},
                       {"cache-control", "no-cache"},
                       {"x-accel-buffering", "no"}});
}

void EventStream::Data(const Json& json) { writer_->Write(fmt::format("data: {}\n\n", Dump(json))); }

void EventStream::Event(const std::string& name, const Json& json) {
  writer_->Write(fmt::format("event: {}\ndata: {}\n\n", name, Dump(json)));
}

void EventStream::Done() { writer_->Write("data: [DONE]\n\n"); }

void SetCommon(const Call& call, GenerationSpec* spec) {
  spec->trace = call.trace;
  spec->client = call.client;
  spec->deadline = call.deadline;
}

}  // namespace moesaic::server
