// Completes commands of a chat, their parameters and file names.
#pragma once

#include <string_view>

#include "app/line_editor.h"

namespace moesaic::app {

/// Returns candidates for the last word of `line`: commands after a leading "/", parameters after "/set ",
/// files after "/save " and "/load " (folders end with "/"). Sorted. Empty within the text of a message.
Completion CompleteChat(std::string_view line);

}  // namespace moesaic::app
