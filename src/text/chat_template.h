// Chat templates: render a conversation as the prompt format the model was trained on, byte for byte like
// `transformers`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace moesaic::text {

/// Input of a template. Every `_json` member is JSON text.
struct ChatInput {
  std::string messages_json;   // array of objects
  std::string tools_json;      // array; empty: none
  std::string documents_json;  // array of objects; empty: none
  std::string variables_json;  // object of additional variables, e.g. {"enable_thinking":false}; empty: none
  bool add_generation_prompt = false;
};

/// A rendered prompt without the long strings of the messages that it contains: each is a hole.
struct TemplateText {
  /// The text of a JSON string without its quotes, which follows `at` bytes of `text`.
  struct Hole {
    size_t at;
    std::string_view json;
  };
  std::string text;
  std::vector<Hole> holes;  // in the order of the prompt
};

/// Permission of a template to call mutating methods such as `list.append`.
enum class Mutation {
  kAllowed,    // required by Kimi-K2's templates; only the rendering's own copies change
  kForbidden,  // an error, as in `transformers`' sandbox
};

struct RenderOptions {
  Mutation mutation = Mutation::kAllowed;
  /// Time that `strftime_now` returns, in seconds since 1970; nullopt: the current time.
  std::optional<int64_t> now;
};

/// A compiled Jinja template. Copies share it; `Render` is thread-safe.
class ChatTemplate {
 public:
  /// Compiles Jinja source. A syntax error names its line.
  static StatusOr<ChatTemplate> FromSource(std::string_view source);

  /// Compiles the `chat_template` of a `tokenizer_config.json` (one template, or several named ones) and
  /// reads its special tokens.
  static StatusOr<ChatTemplate> FromConfig(std::string_view tokenizer_config_json);

  /// Reads a folder in Hub layout: `chat_template.jinja`, otherwise `chat_template.json`, otherwise
  /// `tokenizer_config.json`. Special tokens come from the latter. Returns NotFound if the model has no
  /// template.
  static StatusOr<ChatTemplate> FromFolder(const std::filesystem::path& folder);

  /// Sets a variable such as "bos_token" for every rendering; variables of the input override it.
  void SetToken(std::string name, std::string text);

  /// Returns the prompt, or the error that the template raises.
  StatusOr<std::string> Render(const ChatInput& input, const RenderOptions& options = {}) const;

  /// Renders without copying long strings: the holes of the result are views of `messages`, which are used
  /// instead of `input.messages_json`. `messages` must be valid JSON. The strings of holes may still be no
  /// UTF-8, or have half of a surrogate pair.
  StatusOr<TemplateText> RenderWithHoles(const ChatInput& input, std::string_view messages,
                                         const RenderOptions& options = {}) const;

  /// Renders with exactly the members of a JSON object as variables.
  StatusOr<std::string> RenderVariables(std::string_view variables_json,
                                        const RenderOptions& options = {}) const;

  /// Returns the source of the template that `Render` uses without tools.
  const std::string& source() const;

 private:
  struct Compiled;
  ChatTemplate() = default;

  const Compiled& TemplateFor(const ChatInput& input) const;
  /// Returns a JSON object with all variables but the messages.
  StatusOr<std::string> Variables(const ChatInput& input) const;

  std::shared_ptr<const Compiled> default_;
  std::shared_ptr<const Compiled> tool_use_;  // template for inputs with tools; may be null
  std::vector<std::pair<std::string, std::string>> tokens_;
  std::string token_members_;  // tokens_ as members of a JSON object
};

}  // namespace moesaic::text
