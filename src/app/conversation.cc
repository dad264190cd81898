#include "app/conversation.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/atomic_file.h"

namespace moesaic::app {
namespace {

nlohmann::ordered_json Messages(const std::string& system,
                                const std::vector<Conversation::Message>& messages) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  if (!system.empty()) all.push_back({{"role", "system"}, {"content", system}});
  for (const auto& message : messages) all.push_back({{"role", message.role}, {"content", message.content}});
  return all;
}

// Typed text may end within a character, but templates need UTF-8.
std::string Dump(const nlohmann::ordered_json& json, int indent) {
  return json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

bool Conversation::DropAnswer() {
  if (messages_.empty() || messages_.back().role != "assistant") return false;
  messages_.pop_back();
  return true;
}

void Conversation::DropQuestion() {
  if (!messages_.empty() && messages_.back().role == "user") messages_.pop_back();
}

bool Conversation::DropOldest() {
  size_t next = 1;
  while (next < messages_.size() && messages_[next].role != "user") ++next;
  if (next >= messages_.size()) return false;
  messages_.erase(messages_.begin(), messages_.begin() + static_cast<int64_t>(next));
  return true;
}

StatusOr<std::string> Conversation::Render(const text::ChatTemplate& chat) const {
  text::ChatInput input;
  input.messages_json = Dump(Messages(system_, messages_), -1);
  input.add_generation_prompt = true;
  return chat.Render(input);
}

Status Conversation::Save(const std::string& path) const {
  return runtime::WriteFileAtomically(path, Dump({{"messages", Messages(system_, messages_)}}, 1) + "\n");
}

Status Conversation::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("{}: cannot be opened", path);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("messages") || !json["messages"].is_array()) {
    return InvalidArgument("{}: not a saved conversation: an object with an array \"messages\"", path);
  }
  Conversation loaded("");
  for (const nlohmann::json& message : json["messages"]) {
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string() ||
        !message.contains("content") || !message["content"].is_string()) {
      return InvalidArgument("{}: every message needs a string \"role\" and \"content\", found {}", path,
                             message.dump());
    }
    if (message["role"] == "system") {
      loaded.system_ = message["content"];
    } else {
      loaded.Add(message["role"], message["content"]);
    }
  }
  *this = std::move(loaded);
  return OkStatus();
}

}  // namespace moesaic::app
