// Edits a line on a terminal, with cursor keys, history (Ctrl-R), completion (Tab), and multi-line pastes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::app {

enum class ReadResult { kLine, kEnd, kInterrupted };

/// Candidates for the text of a line from byte `begin` to the cursor.
struct Completion {
  size_t begin = 0;
  std::vector<std::string> candidates;
  bool adds_space = true;  // adds a space after a unique candidate
};
/// Receives the line up to the cursor.
using Completer = std::function<Completion(std::string_view line)>;

class LineEditor {
 public:
  virtual ~LineEditor() = default;
  /// Reads one line without its end, or several that were pasted. The terminal mode is changed while it waits
  /// and restored afterwards. Returns kInterrupted after a signal (interrupt.h).
  virtual ReadResult ReadLine(const std::string& prompt, std::string* line) = 0;
  /// Adds a message to the history and to its file.
  virtual void Remember(const std::string& message) = 0;
};

/// Opens an editor on standard input and output, which must be terminals. Returns null if this build has no
/// libedit, or if the terminal cannot move its cursor (TERM is "dumb" or unset). `history_file` is read now
/// and created when needed, readable by its owner only; "": none.
std::unique_ptr<LineEditor> OpenLineEditor(const std::string& history_file, Completer completer);

/// Returns XDG_STATE_HOME/moesaic/chat_history, else ~/.local/state/moesaic/chat_history; "" without a home
/// folder.
std::string HistoryFile();

}  // namespace moesaic::app
