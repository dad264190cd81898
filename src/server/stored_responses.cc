// Reads, replays and deletes responses that were stored.
#include <limits>
#include <utility>

#include "server/call.h"
#include "server/query.h"
#include "server/response_events.h"
#include "server/response_items.h"

namespace moesaic::server {
namespace {

StatusOr<StoredResponse> Found(const GenerationContext& context, const Call& call) {
  const std::string& id = call.path_values.front();
  auto found = context.responses.Find(id, call.owner);
  if (!found || found->is_conversation) return NotFound("Response with id '{}' not found.", id);
  return *std::move(found);
}

}  // namespace

Status GetResponse(const GenerationContext& context, Call& call) {
  const std::string& query = call.request.query;
  ASSIGN_OR_RETURN(const bool stream, QueryBool(query, "stream"));
  ASSIGN_OR_RETURN(const int after,
                   QueryInt(query, "starting_after", 0, std::numeric_limits<int>::max(), /*otherwise=*/-1));
  ASSIGN_OR_RETURN(const StoredResponse found, Found(context, call));
  if (!stream) {
    SendJson(*call.writer, found.response);
    return OkStatus();
  }
  ResponseEvents events(call.writer, after);
  ReplayResponse(found.response, &events);
  return OkStatus();
}

Status DeleteResponse(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const StoredResponse found, Found(context, call));
  context.responses.Remove(found.id, call.owner);
  SendJson(*call.writer, {{"id", found.id}, {"object", "response"}, {"deleted", true}});
  return OkStatus();
}

Status ListInputItems(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const StoredResponse found, Found(context, call));
  ASSIGN_OR_RETURN(const Json page, ItemPage(found.input, call.request.query));
  SendJson(*call.writer, page);
  return OkStatus();
}

Status CancelResponse(const GenerationContext& context, Call& call) {
  RETURN_IF_ERROR(Found(context, call).status());
  return InvalidArgument("Cannot cancel a synchronous response: to end one, close its connection.");
}

}  // namespace moesaic::server
