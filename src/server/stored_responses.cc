// Reads, replays and deletes responses that were stored.
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "server/call.h"
#include "server/query.h"
#include "server/response_events.h"
#include "server/response_items.h"

namespace moesaic::server {
namespace {

// Calls `read` with the text of the path's response.
Status ReadResponse(const GenerationContext& context, const Call& call,
                    const std::function<void(const StoredText&)>& read) {
  const std::string& id = call.path_values.front();
  bool found = false;
  context.responses.Read(id, call.owner, [&](const StoredText& text) {
    found = !text.is_conversation;
    if (found) read(text);
  });
  return found ? OkStatus() : NotFound("Response with id '{}' not found.", id);
}

}  // namespace

Status GetResponse(const GenerationContext& context, Call& call) {
  const std::string& query = call.request.query;
  ASSIGN_OR_RETURN(const bool stream, QueryBool(query, "stream"));
  ASSIGN_OR_RETURN(const int after,
                   QueryInt(query, "starting_after", 0, std::numeric_limits<int>::max(), /*otherwise=*/-1));
  std::string response;
  RETURN_IF_ERROR(ReadResponse(context, call, [&](const StoredText& text) { response = text.response; }));
  if (!stream) {
    SendDumped(*call.writer, std::move(response));
    return OkStatus();
  }
  ResponseEvents events(call.writer, after);
  ReplayResponse(ParseDumped(response), &events);
  return OkStatus();
}

Status DeleteResponse(const GenerationContext& context, Call& call) {
  RETURN_IF_ERROR(ReadResponse(context, call, [](const StoredText&) {}));
  const std::string& id = call.path_values.front();
  context.responses.Remove(id, call.owner);
  SendJson(*call.writer, {{"id", id}, {"object", "response"}, {"deleted", true}});
  return OkStatus();
}

Status ListInputItems(const GenerationContext& context, Call& call) {
  StatusOr<std::string> page;
  RETURN_IF_ERROR(ReadResponse(
      context, call, [&](const StoredText& text) { page = ItemPage(text.input, call.request.query); }));
  RETURN_IF_ERROR(page.status());
  SendDumped(*call.writer, *std::move(page));
  return OkStatus();
}

Status CancelResponse(const GenerationContext& context, Call& call) {
  RETURN_IF_ERROR(ReadResponse(context, call, [](const StoredText&) {}));
  return InvalidArgument("Cannot cancel a synchronous response: to end one, close its connection.");
}

}  // namespace moesaic::server
