// Builds without libedit read plain lines.
#include "app/line_editor.h"

namespace moesaic::app {

std::unique_ptr<LineEditor> OpenLineEditor(const std::string&, Completer) { return nullptr; }

}  // namespace moesaic::app
