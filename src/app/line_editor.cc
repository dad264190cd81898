#include "app/line_editor.h"

#include <cstdlib>

namespace moesaic::app {

std::string HistoryFile() {
  const char* state = std::getenv("XDG_STATE_HOME");
  if (state != nullptr && *state == '/') return std::string(state) + "/moesaic/chat_history";
  const char* home = std::getenv("HOME");
  return home == nullptr || *home == '\0' ? "" : std::string(home) + "/.local/state/moesaic/chat_history";
}

}  // namespace moesaic::app
