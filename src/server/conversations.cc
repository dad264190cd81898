// Implements /v1/conversations: items that several responses share.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "server/answer.h"
#include "server/call.h"
#include "server/conversations.h"
#include "server/response_items.h"

namespace moesaic::server {
namespace {

constexpr size_t kMaxItems = 20;
constexpr size_t kMaxMetadata = 16;
constexpr size_t kMaxMetadataKey = 64;
constexpr size_t kMaxMetadataValue = 512;

Status NoConversation(const std::string& id) { return NotFound("Conversation with id '{}' not found.", id); }

Status NoItem(const Call& call) {
  return NotFound("Item with id '{}' not found in conversation '{}'.", call.path_values[1],
                  call.path_values[0]);
}

// Calls `read` with the text of the path's conversation.
Status ReadStored(const GenerationContext& context, const Call& call,
                  const std::function<void(const StoredText&)>& read) {
  bool found = false;
  context.responses.Read(call.path_values[0], call.owner, [&](const StoredText& text) {
    found = text.is_conversation;
    if (found) read(text);
  });
  return found ? OkStatus() : NoConversation(call.path_values[0]);
}

// Returns the text of the path's item.
StatusOr<std::string> FoundItem(const GenerationContext& context, const Call& call) {
  std::string item;
  RETURN_IF_ERROR(ReadStored(
      context, call, [&](const StoredText& text) { item = text.messages.Find(call.path_values[1]); }));
  if (item.empty()) return NoItem(call);
  return item;
}

// Reads the "items" of a body. One request may add at most kMaxItems.
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

Status Outcome(ResponseStore::Updated updated, const std::string& id) {
  if (updated == ResponseStore::Updated::kUnknown) return NoConversation(id);
  if (updated == ResponseStore::Updated::kTooLarge) {
    return FieldError(
        "items", "invalid_value",
        "Invalid 'items': a stored conversation has at most 16 MiB, and less if --stored-responses-memory is "
        "less");
  }
  return OkStatus();
}

// Changes the conversation of the path as a whole. `change` may be called several times.
Status Change(const GenerationContext& context, const Call& call,
              const std::function<Status(StoredResponse&)>& change) {
  const std::string& id = call.path_values[0];
  Status status;
  const auto updated = context.responses.Update(id, call.owner, [&](StoredResponse& stored) {
    status = stored.is_conversation ? change(stored) : NoConversation(id);
    return status.ok();
  });
  RETURN_IF_ERROR(status);
  return Outcome(updated, id);
}

}  // namespace

StatusOr<Json> ConversationItems(const GenerationContext& context, const Call& call, const std::string& id) {
  std::optional<StoredResponse> found = context.responses.Find(id, call.owner);
  if (!found || !found->is_conversation) return NoConversation(id);
  return std::move(found->messages);
}

Status CreateConversation(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  ASSIGN_OR_RETURN(Json items, ReadItems(body));
  ASSIGN_OR_RETURN(Json metadata, ReadMetadata(body));
  const std::string id = NewId("conv_");
  Json conversation = {
      {"id", id}, {"object", "conversation"}, {"created_at", UnixNow()}, {"metadata", std::move(metadata)}};
  if (!context.responses.Add({.id = id,
                              .owner = call.owner,
                              .response = conversation,
                              .messages = std::move(items),
                              .is_conversation = true})) {
    return InvalidArgument(
        "a stored conversation has at most 16 MiB, and less if --stored-responses-memory is less; it needs "
        "--max-stored-responses above 0");
  }
  SendJson(*call.writer, conversation);
  return OkStatus();
}

Status GetConversation(const GenerationContext& context, Call& call) {
  std::string conversation;
  RETURN_IF_ERROR(ReadStored(context, call, [&](const StoredText& text) { conversation = text.response; }));
  SendDumped(*call.writer, std::move(conversation));
  return OkStatus();
}

Status UpdateConversation(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  ASSIGN_OR_RETURN(const Json metadata, ReadMetadata(body));
  Json answer;
  RETURN_IF_ERROR(Change(context, call, [&](StoredResponse& stored) {
    stored.response["metadata"] = metadata;
    answer = stored.response;
    return OkStatus();
  }));
  SendJson(*call.writer, answer);
  return OkStatus();
}

Status DeleteConversation(const GenerationContext& context, Call& call) {
  const std::string& id = call.path_values[0];
  RETURN_IF_ERROR(ReadStored(context, call, [](const StoredText&) {}));
  context.responses.Remove(id, call.owner);
  SendJson(*call.writer, {{"id", id}, {"object", "conversation.deleted"}, {"deleted", true}});
  return OkStatus();
}

Status ListItems(const GenerationContext& context, Call& call) {
  StatusOr<std::string> page;
  RETURN_IF_ERROR(ReadStored(
      context, call, [&](const StoredText& text) { page = ItemPage(text.messages, call.request.query); }));
  RETURN_IF_ERROR(page.status());
  SendDumped(*call.writer, *std::move(page));
  return OkStatus();
}

Status AddItems(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  if (body.ok() && !body.Has("items")) {
    body.Fail("items", "missing_required_parameter", "Missing required parameter: 'items'.");
  }
  ASSIGN_OR_RETURN(const Json items, ReadItems(body));
  const std::string& id = call.path_values[0];
  RETURN_IF_ERROR(Outcome(context.responses.Append(id, call.owner, items), id));
  ASSIGN_OR_RETURN(std::string page, ItemPage(StoredItems(items), "limit=100&order=asc"));
  SendDumped(*call.writer, std::move(page));
  return OkStatus();
}

Status GetItem(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(std::string item, FoundItem(context, call));
  SendDumped(*call.writer, std::move(item));
  return OkStatus();
}

Status DeleteItem(const GenerationContext& context, Call& call) {
  RETURN_IF_ERROR(FoundItem(context, call).status());  // Change() parses the conversation
  Json answer;
  RETURN_IF_ERROR(Change(context, call, [&](StoredResponse& stored) {
    const auto found = std::find_if(stored.messages.begin(), stored.messages.end(),
                                    [&call](const Json& item) { return item["id"] == call.path_values[1]; });
    if (found == stored.messages.end()) return NoItem(call);
    stored.messages.erase(found);
    answer = stored.response;
    return OkStatus();
  }));
  SendJson(*call.writer, answer);
  return OkStatus();
}

}  // namespace moesaic::server
