// The served model with its text and sampling settings. It is immutable while the server runs.
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
  std::vector<std::string> names;  ///< names for the field "model"; answers have the first
  text::Tokenizer tokenizer;
  std::optional<PromptTemplate> chat;  ///< chat template; without one, the chat endpoints refuse requests
  text::GrammarCompiler grammars;
  text::ToolFormat tools = text::ToolFormat::kNone;
  text::ReasoningFormat reasoning = text::ReasoningFormat::kNone;
  engine::SamplingParams defaults;  ///< values of the fields that a request leaves out
  /// Maximum tokens of a chat's or response's output whose request sets no limit.
  int default_output = std::numeric_limits<int>::max();
  int max_context = 0;  ///< maximum tokens of prompt and output together
  int vocab_size = 0;
  engine::SparsityOptions sparsity = {};   ///< options of the engine
  int64_t created = 0;                     ///< start time in seconds since 1970
  engine::EngineThread* engine = nullptr;  ///< borrowed; outlives the server

  size_t longest_token = 1;  ///< bytes of the longest token

  /// Tokenizes `text`. Refuses a text that exceeds the context with any tokens, before it tokenizes. `param`
  /// is the field of the text.
  StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool add_special,
                                        const std::string& param) const;
  /// Returns NotFound unless `name` is one of the model's names or empty.
  Status CheckName(const std::string& name) const;
};

/// Returns the bytes of the longest token. Scans the whole vocabulary.
size_t LongestToken(const text::Tokenizer& tokenizer);

}  // namespace moesaic::server
