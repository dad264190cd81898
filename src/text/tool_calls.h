// Parses tool calls in a model's output while it streams. It never fails: text that is not a call is content.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::text {

/// Syntax of calls in a model's template.
enum class ToolFormat {
  kNone,
  kHermes,       ///< <tool_call>{"name", "arguments"}</tool_call>: Hermes, Qwen2.5, Qwen3
  kQwen3Coder,   ///< <tool_call><function=NAME><parameter=KEY>...
  kDeepSeekV3,   ///< V3, R1: function<|tool sep|>NAME and a fenced block of JSON
  kDeepSeekV31,  ///< NAME<|tool sep|>JSON
  kDeepSeekV32,  ///< <|DSML|invoke name="NAME"> ...
  kKimiK2,       ///< functions.NAME:INDEX<|tool_call_argument_begin|>JSON
  kGlm4,         ///< <tool_call>NAME<arg_key>...<arg_value>...
  kLlama3,       ///< the whole answer is {"name", "parameters"}
  kMiniMaxM2,    ///< <minimax:tool_call><invoke name="NAME"> ...
};

/// Parses a name such as "none", "hermes" or "deepseek-v3.1". InvalidArgument lists all names.
StatusOr<ToolFormat> ParseToolFormat(std::string_view name);
const char* Name(ToolFormat format);
/// Returns all names, separated by commas.
std::string ToolFormatNames();
/// Returns the format whose markers the source of a chat template contains. Without a known marker, it is
/// kHermes if the template mentions tools, and otherwise kNone.
ToolFormat DetectToolFormat(std::string_view template_source);
/// Returns the markers that frame calls; some may be empty. Some are special tokens of the model, so decoding
/// must not skip special tokens with these texts.
std::vector<std::string_view> ToolMarks(ToolFormat format);

/// Returns the marker that opens calls, which also ends reasoning that the model left open; empty if there is
/// none.
std::string_view CallOpen(ToolFormat format);

/// A piece of one call. Pieces of a call arrive in order; the first contains the name.
struct ToolCallDelta {
  int index = 0;          // index among the answer's calls
  std::string id;         // sent with the name, if the model assigns ids to calls
  std::string name;       // in the first piece only
  std::string arguments;  // JSON text; all pieces together are the arguments as written by the model
};

struct ToolDelta {
  std::string content;
  std::vector<ToolCallDelta> calls;
};

/// Parses one output. It accepts any text, cut at any position, and drops white space before a call.
class ToolCallParser {
 public:
  virtual ~ToolCallParser() = default;
  /// Consumes `piece` and appends the content and calls that are now determined.
  virtual void Push(std::string_view piece, ToolDelta* delta) = 0;
  /// Ends the output and appends the text that was held back.
  virtual void Finish(ToolDelta* delta) = 0;
  int calls() const { return calls_; }  ///< number of calls begun so far

 protected:
  int calls_ = 0;
};

/// `tools_json`: tools in the format of the OpenAI API; may be empty. Their schemas determine argument types
/// if the format does not. For kNone all text is content.
std::unique_ptr<ToolCallParser> MakeToolCallParser(ToolFormat format, std::string_view tools_json);

}  // namespace moesaic::text
