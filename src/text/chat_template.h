// Chat templates: a conversation as the prompt the model was trained on, byte for byte what `transformers`
// renders.
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

/// What a template renders. Every `_json` member is JSON text.
struct ChatInput {
  std::string messages_json;   // array of objects
  std::string tools_json;      // array; empty: none
  std::string documents_json;  // array of objects; empty: none
  std::string variables_json;  // object of further variables, e.g. {"enable_thinking":false}; empty: none
  bool add_generation_prompt = false;
};

/// Whether `list.append` and its like work inside a template.
enum class Mutation {
  kAllowed,    // Kimi-K2's templates need it; they change only the rendering's own copies
  kForbidden,  // an error, as in `transformers`' sandbox
};

struct RenderOptions {
  Mutation mutation = Mutation::kAllowed;
  /// The time `strftime_now` tells, in seconds since 1970; none: the clock's.
  std::optional<int64_t> now;
};

/// A compiled Jinja template. Copies share it; `Render` may be called from any thread.
class ChatTemplate {
 public:
  /// Compiles Jinja source. A syntax error names its line.
  static StatusOr<ChatTemplate> FromSource(std::string_view source);

  /// From the bytes of a `tokenizer_config.json`: its `chat_template` (one, or named ones) and special
  /// tokens.
  static StatusOr<ChatTemplate> FromConfig(std::string_view tokenizer_config_json);

  /// A folder in Hub layout: `chat_template.jinja`, else `chat_template.json`, else `tokenizer_config.json`;
  /// special tokens from the latter. NotFound when the model has no template.
  static StatusOr<ChatTemplate> FromFolder(const std::filesystem::path& folder);

  /// Sets a variable such as "bos_token" that every rendering sees unless the input says otherwise.
  void SetToken(std::string name, std::string text);

  /// The prompt, or what the template raises.
  StatusOr<std::string> Render(const ChatInput& input, const RenderOptions& options = {}) const;

  /// Renders with exactly the members of a JSON object as variables.
  StatusOr<std::string> RenderVariables(std::string_view variables_json,
                                        const RenderOptions& options = {}) const;

  /// The source of the template that `Render` uses without tools.
  const std::string& source() const;

 private:
  struct Compiled;
  ChatTemplate() = default;

  std::shared_ptr<const Compiled> default_;
  std::shared_ptr<const Compiled> tool_use_;  // for inputs with tools; may be null
  std::vector<std::pair<std::string, std::string>> tokens_;
};

}  // namespace moesaic::text
