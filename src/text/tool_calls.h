// Finds calls of tools in what a model writes, while it still writes. Never fails: what is no call is text.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::text {

/// How a model's template writes calls.
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

/// "none", "hermes", "qwen3-coder", "deepseek-v3", ...
StatusOr<ToolFormat> ParseToolFormat(std::string_view name);
const char* Name(ToolFormat format);
/// All names, separated by commas.
std::string ToolFormatNames();
/// The format whose marks stand in a chat template's source; kHermes for a template that has none of them
/// but knows tools.
ToolFormat DetectToolFormat(std::string_view template_source);
/// The texts that frame calls, some of which are special tokens that must not be left out of the text.
std::vector<std::string_view> ToolMarks(ToolFormat format);

/// The mark that opens calls, which ends a thought that the model left open; empty: there is none.
std::string_view CallOpen(ToolFormat format);

/// A piece of one call. Pieces of a call come in order; the first has the name.
struct ToolCallDelta {
  int index = 0;          // among the answer's calls
  std::string id;         // with the name, when the model gives calls ids
  std::string name;       // in the first piece only
  std::string arguments;  // JSON text; all pieces together are the arguments as the model wrote them
};

struct ToolDelta {
  std::string content;
  std::vector<ToolCallDelta> calls;
};

/// One output's way through; any text is taken, cut anywhere. White space before a call is left out.
class ToolCallParser {
 public:
  virtual ~ToolCallParser() = default;
  /// Appends what `piece` settles.
  virtual void Push(std::string_view piece, ToolDelta* delta) = 0;
  /// The output is over: appends what was held back.
  virtual void Finish(ToolDelta* delta) = 0;
  int calls() const { return calls_; }  ///< begun so far

 protected:
  int calls_ = 0;
};

/// `tools_json`: the tools as the OpenAI API has them, whose schemas tell types where the format does not;
/// may be empty. For kNone everything is content.
std::unique_ptr<ToolCallParser> MakeToolCallParser(ToolFormat format, std::string_view tools_json);

}  // namespace moesaic::text
