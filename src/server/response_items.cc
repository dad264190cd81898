#include "server/response_items.h"

#include <algorithm>
#include <utility>

#include "server/api_error.h"
#include "server/generation.h"
#include "server/query.h"
#include "server/responses_request.h"

namespace moesaic::server {
namespace {

const char* IdPrefix(const std::string& type) {
  if (type == "function_call") return "fc_";
  if (type == "function_call_output") return "fco_";
  if (type == "reasoning") return "rs_";
  return "msg_";
}

// Returns a member that is text, or `otherwise` where it is absent or null.
std::string TextIn(const Json& object, const char* name, const char* otherwise) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? otherwise : found->get<std::string>();
}

// Returns a text as a content part of a message of `role`.
Json PartOf(const std::string& role, const Json& text) {
  if (role != "assistant") return {{"type", "input_text"}, {"text", text}};
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}};
}

// Converts "content" to an array of parts.
void SpellContent(Json* message) {
  const std::string role = (*message)["role"];
  Json& content = (*message)["content"];
  if (!content.is_array()) {
    content = Json::array({PartOf(role, content.is_string() ? content : Json(""))});
    return;
  }
  for (Json& part : content) {
    const std::string type = TextIn(part, "type", "text");
    if (type == "text") part = PartOf(role, part["text"]);
    if (type == "output_text" && !part.contains("annotations")) part["annotations"] = Json::array();
  }
}

Json KeptItem(const Json& item) {
  const std::string type = TextIn(item, "type", "message");
  Json kept = {{"id", NewId(IdPrefix(type))}, {"type", type}, {"status", "completed"}};
  for (const auto& [name, value] : item.items()) {
    if (name != "id" && !value.is_null()) kept[name] = value;
  }
  if (type == "message") SpellContent(&kept);
  if (type == "reasoning" && !kept.contains("summary")) kept["summary"] = Json::array();
  return kept;
}

}  // namespace

StatusOr<Json> KeptItems(const Json& items, const std::string& path) {
  Json messages = Json::array();
  RETURN_IF_ERROR(AppendItems(items, path, &messages));  // checks them
  Json kept = Json::array();
  for (size_t i = 0; i < items.size(); ++i) {
    Fields fields(items[i], fmt::format("{}[{}]", path, i));
    std::string id, status;
    fields.String("id", &id);
    fields.String("status", &status);
    RETURN_IF_ERROR(fields.status());
    kept.push_back(KeptItem(items[i]));
  }
  return kept;
}

StatusOr<Json> InputItems(const Json& input) {
  if (input.is_null()) return Json::array();
  if (!input.is_string()) return KeptItems(input, "input");
  return KeptItems(Json::array({Json{{"type", "message"}, {"role", "user"}, {"content", input}}}), "input");
}

StatusOr<std::string> ItemPage(const StoredItems& items, const std::string& query) {
  ASSIGN_OR_RETURN(const int limit, QueryInt(query, "limit", 1, 100, 20));
  const std::string order = QueryValue(query, "order"), after = QueryValue(query, "after");
  if (!order.empty() && order != "asc" && order != "desc") {
    return FieldError("order", "invalid_value",
                      fmt::format("Invalid 'order': 'asc' or 'desc', found '{}'", order));
  }
  const size_t count = items.size();
  const auto item = [&](size_t i) { return items[order == "asc" ? i : count - 1 - i]; };
  size_t first = 0;
  if (!after.empty()) {
    while (first < count && IdOf(item(first)) != after) ++first;
    if (first == count) {
      return FieldError("after", "invalid_value",
                        fmt::format("Invalid 'after': there is no item '{}'", after));
    }
    ++first;
  }
  const size_t end = std::min(count, first + static_cast<size_t>(limit));
  std::string data;
  for (size_t i = first; i < end; ++i) {
    if (i > first) data += ',';
    data += item(i);
  }
  const auto id = [&](size_t i) { return first == end ? "null" : fmt::format("\"{}\"", IdOf(item(i))); };
  return fmt::format(R"({{"object":"list","data":[{}],"first_id":{},"last_id":{},"has_more":{}}})", data,
                     id(first), id(end - 1), end < count);
}

}  // namespace moesaic::server
