// /v1/conversations: items that several responses share.
#include <algorithm>
#include <functional>
#include <utility>

#include "server/answer.h"
#include "server/call.h"
#include "server/conversations.h"
#include "server/response_items.h"

namespace moesaic::server {
namespace {

constexpr std::string_view kPath = "/v1/conversations/";
constexpr size_t kMaxItems = 20;
constexpr size_t kMaxMetadata = 16;
constexpr size_t kMaxMetadataKey = 64;
constexpr size_t kMaxMetadataValue = 512;

// A parsed path below "/v1/conversations/": ID, ID/items, or ID/items/ITEM.
struct Place {
  std::string id, item;
  bool items = false;
};

StatusOr<Place> PlaceOf(const Call& call) {
  const std::string& path = call.request.path;
  Place place;
  place.id = path.substr(kPath.size());
  const size_t slash = place.id.find('/');
  if (slash == std::string::npos) return place;
  std::string rest = place.id.substr(slash + 1);
  place.id.erase(slash);
  place.items = rest == "items" || rest.starts_with("items/");
  if (!place.items) return NotFound("there is no {} {}", call.request.method, path);
  if (rest.size() > 6) place.item = rest.substr(6);
  return place;
}

Status NoItem(const Place& place) {
  return NotFound("Item with id '{}' not found in conversation '{}'.", place.item, place.id);
}

StatusOr<StoredResponse> Found(const GenerationContext& context, const Call& call, const std::string& id) {
  auto found = context.responses.Find(id, call.owner);
  if (!found || found->response["object"] != "conversation") return NoConversation(id);
  return *std::move(found);
}

// The "items" of a body, of which there may be few at a time.
StatusOr<Json> ReadItems(Fields& body) {
  const Json* items = body.Array("items");
  RETURN_IF_ERROR(body.status());
  if (items == nullptr) return Json::array();
  if (items->size() > kMaxItems) {
    return FieldError("items", "array_above_max_length",
                      fmt::format("Invalid 'items': at most {}, found {}", kMaxItems, items->size()));
  }
  return KeptItems(*items, "items");
}

StatusOr<Json> ReadMetadata(Fields& body) {
  const Json* metadata = body.Object("metadata");
  RETURN_IF_ERROR(body.status());
  if (metadata == nullptr) return Json::object();
  bool fits = metadata->size() <= kMaxMetadata;
  for (const auto& [key, value] : metadata->items()) {
    fits = fits && key.size() <= kMaxMetadataKey && value.is_string() &&
           value.get_ref<const std::string&>().size() <= kMaxMetadataValue;
  }
  if (fits) return *metadata;
  return FieldError(
      "metadata", "invalid_value",
      fmt::format("Invalid 'metadata': at most {} strings of {} bytes, each under a key of at most {}",
                  kMaxMetadata, kMaxMetadataValue, kMaxMetadataKey));
}

// Changes the conversation at `id` as a whole.
Status Change(const GenerationContext& context, const Call& call, const std::string& id,
              const std::function<Status(StoredResponse&)>& change) {
  Status status;
  const auto changed = context.responses.Update(id, call.owner, [&](StoredResponse& stored) {
    status = stored.response["object"] == "conversation" ? change(stored) : NoConversation(id);
    return status.ok();
  });
  RETURN_IF_ERROR(status);
  if (changed == ResponseStore::Updated::kUnknown) return NoConversation(id);
  if (changed == ResponseStore::Updated::kTooLarge) {
    return FieldError(
        "items", "invalid_value",
        "Invalid 'items': the conversation would take more memory than --stored-responses-memory");
  }
  return OkStatus();
}

Status AddItems(const GenerationContext& context, Call& call, const Place& place) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  if (body.ok() && !body.Has("items")) {
    body.Fail("items", "missing_required_parameter", "Missing required parameter: 'items'.");
  }
  ASSIGN_OR_RETURN(const Json items, ReadItems(body));
  RETURN_IF_ERROR(Change(context, call, place.id, [&items](StoredResponse& stored) {
    for (const Json& item : items) stored.messages.push_back(item);
    return OkStatus();
  }));
  ASSIGN_OR_RETURN(const Json page, ItemPage(items, "limit=100&order=asc"));
  SendJson(*call.writer, page);
  return OkStatus();
}

}  // namespace

Status NoConversation(const std::string& id) { return NotFound("Conversation with id '{}' not found.", id); }

StatusOr<Json> ConversationItems(const GenerationContext& context, const Call& call, const std::string& id) {
  ASSIGN_OR_RETURN(StoredResponse found, Found(context, call, id));
  return std::move(found.messages);
}

Status CreateConversation(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  ASSIGN_OR_RETURN(Json items, ReadItems(body));
  ASSIGN_OR_RETURN(Json metadata, ReadMetadata(body));
  const std::string id = NewId("conv_");
  Json conversation = {
      {"id", id}, {"object", "conversation"}, {"created_at", UnixNow()}, {"metadata", std::move(metadata)}};
  if (!context.responses.Add({id, call.owner, conversation, std::move(items)})) {
    return InvalidArgument(
        "this server keeps no conversation of that size: see --max-stored-responses and "
        "--stored-responses-memory");
  }
  SendJson(*call.writer, conversation);
  return OkStatus();
}

Status GetConversation(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(call));
  ASSIGN_OR_RETURN(const StoredResponse found, Found(context, call, place.id));
  if (!place.items) {
    SendJson(*call.writer, found.response);
    return OkStatus();
  }
  if (place.item.empty()) {
    ASSIGN_OR_RETURN(const Json page, ItemPage(found.messages, call.request.query));
    SendJson(*call.writer, page);
    return OkStatus();
  }
  for (const Json& item : found.messages) {
    if (item["id"] != place.item) continue;
    SendJson(*call.writer, item);
    return OkStatus();
  }
  return NoItem(place);
}

Status PostConversation(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(call));
  if (place.items && place.item.empty()) return AddItems(context, call, place);
  if (place.items) return NotFound("there is no POST {}", call.request.path);
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  ASSIGN_OR_RETURN(const Json metadata, ReadMetadata(body));
  Json answer;
  RETURN_IF_ERROR(Change(context, call, place.id, [&](StoredResponse& stored) {
    stored.response["metadata"] = metadata;
    answer = stored.response;
    return OkStatus();
  }));
  SendJson(*call.writer, answer);
  return OkStatus();
}

Status DeleteConversation(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(call));
  if (!place.items) {
    RETURN_IF_ERROR(Found(context, call, place.id).status());
    context.responses.Remove(place.id, call.owner);
    SendJson(*call.writer, {{"id", place.id}, {"object", "conversation.deleted"}, {"deleted", true}});
    return OkStatus();
  }
  if (place.item.empty()) return NotFound("there is no DELETE {}", call.request.path);
  Json answer;
  RETURN_IF_ERROR(Change(context, call, place.id, [&](StoredResponse& stored) {
    const auto found = std::find_if(stored.messages.begin(), stored.messages.end(),
                                    [&place](const Json& item) { return item["id"] == place.item; });
    if (found == stored.messages.end()) return NoItem(place);
    stored.messages.erase(found);
    answer = stored.response;
    return OkStatus();
  }));
  SendJson(*call.writer, answer);
  return OkStatus();
}

}  // namespace moesaic::server
