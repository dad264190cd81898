// Finds the form in which a chat template shows the tool calls of earlier turns, and renders conversations.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

#include "base/status.h"
#include "text/chat_template.h"

namespace moesaic::server {

/// The form of an assistant's message with tool calls that a template shows completely. Templates disagree.
/// DeepSeek-V3's shows calls only where "content" is null and concatenates the arguments as text. Qwen3's
/// fails on null. Most templates print an object of arguments as JSON.
struct CallForm {
  enum class Content { kEmpty, kNull, kAbsent };
  Content content = Content::kEmpty;  ///< "content" of a message that has calls and no text
  bool text_arguments = false;        ///< "arguments" are JSON text, not an object
  bool split = false;                 ///< text and calls of one message become two messages
  bool short_ids = false;  ///< ids of calls must have 9 letters or digits, as Mistral's templates demand
};

/// Returns a random id for a call of the model, of a length that the template accepts in later turns.
std::string NewCallId(const CallForm& form);

/// Renders probes with `chat` and returns the form that it shows best. A template that shows calls in no form
/// gets the default.
CallForm ProbeCallForm(const text::ChatTemplate& chat);

/// A template with its form. It is immutable, and any thread may use it.
class PromptTemplate {
 public:
  /// Renders the probes of ProbeCallForm.
  explicit PromptTemplate(text::ChatTemplate chat) : chat_(std::move(chat)), form_(ProbeCallForm(chat_)) {}

  /// Renders the messages of a Conversation with the other members of `input`. InvalidArgument when the
  /// template raises an exception, or when it leaves out a call of an earlier turn.
  StatusOr<std::string> Render(const nlohmann::ordered_json& messages, text::ChatInput input) const;

  const CallForm& call_form() const { return form_; }

 private:
  text::ChatTemplate chat_;
  CallForm form_;
};

}  // namespace moesaic::server
