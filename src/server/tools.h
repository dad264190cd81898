// A request's tools, which three APIs write in three ways and one reader checks.
#pragma once

#include "server/chat_prompt.h"
#include "server/json_fields.h"

namespace moesaic::server {

constexpr int kMaxTools = 512;

/// How an API writes a tool.
struct ToolForm {
  const char* holder;  ///< the tool's member that describes the function; null: the tool itself does
  const char* type;    ///< of tools that are functions
  const char* schema;  ///< what it calls the schema of the arguments
  bool needs_schema;
};

inline constexpr ToolForm kChatTool{"function", "function", "parameters", false};
inline constexpr ToolForm kResponsesTool{nullptr, "function", "parameters", false};
inline constexpr ToolForm kMessagesTool{nullptr, "custom", "input_schema", true};

/// Reads "tools" into `conversation` in the form that templates know, which is that of /v1/chat/completions,
/// with a description and parameters for each. The model may use them, where there are any, until a
/// "tool_choice" says otherwise.
void ReadTools(Fields& body, const ToolForm& form, Conversation* conversation);

bool HasTool(const Conversation& conversation, const std::string& name);

}  // namespace moesaic::server
