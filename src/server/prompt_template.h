// A chat template and the form in which it shows the tool calls of earlier turns.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

#include "base/status.h"
#include "text/chat_template.h"

namespace moesaic::server {

/// The form of an assistant's message with tool calls that a template shows completely. Templates disagree:
/// DeepSeek-V3's shows calls only where "content" is null and concatenates the arguments as text, Qwen3's
/// fails on null, and most write an object of arguments as JSON themselves.
struct CallForm {
  enum class Content { kEmpty, kNull, kAbsent };
  Content content = Content::kEmpty;  ///< "content" of a message that has calls and no text
  bool text_arguments = false;        ///< "arguments" are JSON text, not an object
  bool split = false;                 ///< text and calls of one message become two messages
  bool short_ids = false;  ///< ids of calls must have 9 letters or digits, as Mistral's templates demand
};

/// A random id for a call that the model makes, of a length that the template accepts in later turns.
std::string NewCallId(const CallForm& form);

/// The form that `chat` shows best, found by rendering probes. A template that shows calls in no form gets
/// the default.
CallForm ProbeCallForm(const text::ChatTemplate& chat);

/// Immutable; any thread.
class PromptTemplate {
 public:
  /// Renders the probes of ProbeCallForm.
  explicit PromptTemplate(text::ChatTemplate chat) : chat_(std::move(chat)), form_(ProbeCallForm(chat_)) {}

  /// Renders `messages`, as Conversation has them, with the other members of `input`. InvalidArgument when
  /// the template raises, or when it leaves out a call of an earlier turn.
  StatusOr<std::string> Render(const nlohmann::ordered_json& messages, text::ChatInput input) const;

  const CallForm& call_form() const { return form_; }

 private:
  text::ChatTemplate chat_;
  CallForm form_;
};

}  // namespace moesaic::server
