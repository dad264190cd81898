// Reads chat requests from files and renders them as the server does.
#pragma once

#include <string>

#include "server/json_fields.h"
#include "server/prompt_template.h"

namespace moesaic::app {

/// Renders the body of a /v1/chat/completions request to a prompt. With `add_generation_prompt` false the
/// prompt ends after the last message, even if the request sets it to true.
StatusOr<std::string> RenderRequest(const server::PromptTemplate& chat, const server::Json& request,
                                    bool add_generation_prompt);

}  // namespace moesaic::app
