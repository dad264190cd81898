// The model behind the server, as its endpoints see it. Immutable once the server runs.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine_thread.h"
#include "engine/request.h"
#include "server/prompt_template.h"
#include "text/grammar.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

struct ServedModel {
  std::vector<std::string> names;  ///< that requests may use; the first is shown
  text::Tokenizer tokenizer;
  std::optional<PromptTemplate> chat;  ///< none: the chat endpoints say so
  text::GrammarCompiler grammars;
  text::ToolFormat tools = text::ToolFormat::kNone;
  text::ReasoningFormat reasoning = text::ReasoningFormat::kNone;
  engine::SamplingParams defaults;  ///< for the fields that a request leaves out
  /// Maximum tokens of a chat's or response's output whose request sets no limit.
  int default_output = std::numeric_limits<int>::max();
  int max_context = 0;  ///< tokens of prompt and output together
  int vocab_size = 0;
  engine::SparsityOptions sparsity = {};   ///< the engine's
  int64_t created = 0;                     ///< seconds since 1970
  engine::EngineThread* engine = nullptr;  ///< borrowed

  size_t longest_token = 1;  ///< bytes that one token can stand for

  /// The ids of `text`. A text that is too long for the context whatever its tokens are is refused unread;
  /// `param` is the field it came from.
  StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool add_special,
                                        const std::string& param) const;
  /// NotFound unless `name` is one of the model's names or empty.
  Status CheckName(const std::string& name) const;
};

/// For ServedModel::longest_token; looks at the whole vocabulary.
size_t LongestToken(const text::Tokenizer& tokenizer);

}  // namespace moesaic::server
