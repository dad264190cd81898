// Chat requests in files, read and rendered as the server reads and renders them.
#pragma once

#include <string>

#include "server/json_fields.h"
#include "server/prompt_template.h"

namespace moesaic::app {

/// The prompt that the body of a /v1/chat/completions request becomes. `add_generation_prompt` false: it ends
/// after the last message, whatever the request says.
StatusOr<std::string> RenderRequest(const server::PromptTemplate& chat, const server::Json& request,
                                    bool add_generation_prompt);

}  // namespace moesaic::app
