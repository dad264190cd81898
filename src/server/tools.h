// Reads and checks a request's tools in the forms of the three APIs.
#pragma once

#include "server/chat_prompt.h"
#include "server/json_fields.h"

namespace moesaic::server {

constexpr int kMaxTools = 512;

/// The form of a tool in one API.
struct ToolForm {
  const char* holder;  ///< name of the member that describes the function; null if the tool itself does
  const char* type;    ///< value of "type" for a function
  const char* schema;  ///< name of the member with the schema of the arguments
  bool needs_schema;
};

inline constexpr ToolForm kChatTool{"function", "function", "parameters", false};
inline constexpr ToolForm kResponsesTool{nullptr, "function", "parameters", false};
inline constexpr ToolForm kMessagesTool{nullptr, "custom", "input_schema", true};

/// Reads "tools" into `conversation` in the form of /v1/chat/completions, which templates use. Adds a
/// description and parameters where they are absent. Sets ToolUse::kAuto if there are tools; "tool_choice"
/// may change it.
void ReadTools(Fields& body, const ToolForm& form, Conversation* conversation);

bool HasTool(const Conversation& conversation, const std::string& name);

}  // namespace moesaic::server
