// The messages of one chat. They can be saved, loaded and rendered to a prompt.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "text/chat_template.h"

namespace moesaic::app {

class Conversation {
 public:
  struct Message {
    std::string role, content;
  };

  explicit Conversation(std::string system) : system_(std::move(system)) {}

  const std::string& system() const { return system_; }  // empty: no system prompt
  void set_system(std::string text) { system_ = std::move(text); }
  const std::vector<Message>& messages() const { return messages_; }
  void Add(std::string role, std::string content) {
    messages_.push_back({std::move(role), std::move(content)});
  }
  void Clear() { messages_.clear(); }
  /// Drops the last answer, so that its question is last. Returns false if there is none.
  bool DropAnswer();
  /// Drops an unanswered question at the end.
  void DropQuestion();
  /// Drops the oldest question and its answer. Returns false if only the last question is left.
  bool DropOldest();

  StatusOr<std::string> Render(const text::ChatTemplate& chat) const;

  /// Writes {"messages": [{"role", "content"}, ...]}, the system prompt first.
  Status Save(const std::string& path) const;
  /// Replaces everything. On an error nothing changes.
  Status Load(const std::string& path);

 private:
  std::string system_;
  std::vector<Message> messages_;
};

}  // namespace moesaic::app
