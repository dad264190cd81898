#include "server/response_events.h"

#include <utility>

namespace moesaic::server {
namespace {

// Returns the text of a stored item's first part, or "".
std::string TextOf(const Json& item) {
  const Json& content = item["content"];
  return content.empty() ? "" : content[0]["text"].get<std::string>();
}

}  // namespace

Json ResponseJson(const ResponseShape& shape, const ResponseStatus& status, Json output, Json usage,
                  Json error) {
  Json json = {{"id", shape.id},        {"object", "response"},       {"created_at", shape.created},
               {"status", status.name}, {"background", false},        {"error", std::move(error)},
               {"model", shape.model},  {"output", std::move(output)}};
  json["incomplete_details"] =
      status.incomplete_reason != nullptr ? Json{{"reason", status.incomplete_reason}} : Json();
  for (const auto& [key, value] : shape.echo.items()) json[key] = value;
  json["usage"] = std::move(usage);
  return json;
}

Json ReasoningItem(const std::string& id, const std::string& text, const char* status) {
  Json content = Json::array();
  if (!text.empty()) content.push_back({{"type", "reasoning_text"}, {"text", text}});
  return {{"id", id},
          {"type", "reasoning"},
          {"summary", Json::array()},
          {"content", std::move(content)},
          {"status", status}};
}

Json TextPart(const std::string& text, Json logprobs) {
  return {{"type", "output_text"},
          {"text", text},
          {"annotations", Json::array()},
          {"logprobs", std::move(logprobs)}};
}

Json MessageItem(const std::string& id, Json content, const char* status) {
  return {{"id", id},
          {"type", "message"},
          {"status", status},
          {"role", "assistant"},
          {"content", std::move(content)}};
}

Json CallItem(const std::string& id, const AnsweredCall& call, const char* status) {
  return {{"id", id},           {"type", "function_call"}, {"status", status},
          {"call_id", call.id}, {"name", call.name},       {"arguments", call.arguments}};
}

void ResponseEvents::Event(const std::string& type, Json members) {
  const int64_t number = sequence_++;
  if (number <= after_) return;
  Json event = {{"type", type}, {"sequence_number", number}};
  for (auto& [key, value] : members.items()) event[key] = std::move(value);
  stream_.Event(type, event);
}

void ResponseEvents::Open(Item item, std::string id) {
  BeginItem(item, std::move(id));
  const Json part =
      item == Item::kMessage ? TextPart("", Json::array()) : Json{{"type", "reasoning_text"}, {"text", ""}};
  Event("response.content_part.added", Placed({{"part", part}}));
}

void ResponseEvents::OpenCall(std::string id, AnsweredCall call) {
  Close("completed");
  call_ = std::move(call);
  BeginItem(Item::kCall, std::move(id));
}

void ResponseEvents::Text(const std::string& piece, Json logprobs) {
  text_ += piece;
  if (open_ == Item::kReasoning) {
    Event("response.reasoning_text.delta", Placed({{"delta", piece}}));
    return;
  }
  for (const Json& entry : logprobs) logprobs_.push_back(entry);
  Event("response.output_text.delta", Placed({{"delta", piece}, {"logprobs", std::move(logprobs)}}));
}

void ResponseEvents::Arguments(const std::string& piece) {
  call_.arguments += piece;
  Event("response.function_call_arguments.delta",
        {{"item_id", item_id_}, {"output_index", output_.size()}, {"delta", piece}});
}

void ResponseEvents::Close(const char* status) {
  if (open_ == Item::kNone) return;
  if (open_ == Item::kMessage) {
    Event("response.output_text.done", Placed({{"text", text_}, {"logprobs", logprobs_}}));
    Event("response.content_part.done", Placed({{"part", TextPart(text_, logprobs_)}}));
  } else if (open_ == Item::kReasoning) {
    Event("response.reasoning_text.done", Placed({{"text", text_}}));
    Event("response.content_part.done", Placed({{"part", {{"type", "reasoning_text"}, {"text", text_}}}}));
  } else {
    Event("response.function_call_arguments.done", {{"item_id", item_id_},
                                                    {"output_index", output_.size()},
                                                    {"name", call_.name},
                                                    {"arguments", call_.arguments}});
  }
  Json item = ItemJson(status);
  Event("response.output_item.done", {{"output_index", output_.size()}, {"item", item}});
  output_.push_back(std::move(item));
  open_ = Item::kNone;
}

Json ResponseEvents::Placed(Json members) const {
  Json placed = {{"item_id", item_id_}, {"output_index", output_.size()}, {"content_index", 0}};
  for (auto& [key, value] : members.items()) placed[key] = value;
  return placed;
}

Json ResponseEvents::ItemJson(const char* status) const {
  switch (open_) {
    case Item::kReasoning:
      return ReasoningItem(item_id_, text_, status);
    case Item::kCall:
      return CallItem(item_id_, call_, status);
    default:
      return MessageItem(
          item_id_,
          std::string(status) == "in_progress" ? Json::array() : Json::array({TextPart(text_, logprobs_)}),
          status);
  }
}

void ResponseEvents::BeginItem(Item item, std::string id) {
  Close("completed");
  open_ = item;
  item_id_ = std::move(id);
  text_.clear();
  logprobs_ = Json::array();
  Event("response.output_item.added", {{"output_index", output_.size()}, {"item", ItemJson("in_progress")}});
}

void ReplayResponse(const Json& response, ResponseEvents* events) {
  using Item = ResponseEvents::Item;
  Json begun = response;
  begun["status"] = "in_progress";
  begun["output"] = Json::array();
  begun["incomplete_details"] = begun["usage"] = nullptr;
  events->Begin();
  events->Event("response.created", {{"response", begun}});
  events->Event("response.in_progress", {{"response", std::move(begun)}});
  for (const Json& item : response["output"]) {
    const auto id = item["id"].get<std::string>();
    const std::string type = item["type"];
    if (type == "function_call") {
      events->OpenCall(id, {item["call_id"], item["name"], ""});
      events->Arguments(item["arguments"]);
    } else if (type == "reasoning") {
      events->Open(Item::kReasoning, id);
      events->Text(TextOf(item), Json::array());
    } else {
      events->Open(Item::kMessage, id);
      events->Text(TextOf(item), item["content"][0]["logprobs"]);
    }
    events->Close(item["status"].get<std::string>().c_str());
  }
  events->Event("response." + response["status"].get<std::string>(), {{"response", response}});
  events->End();
}

}  // namespace moesaic::server
