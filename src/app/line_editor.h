// Edits a line on a terminal: cursor keys, history with Ctrl-R, completion with Tab, and pastes of many
// lines.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::app {

enum class ReadResult { kLine, kEnd, kInterrupted };

/// Words that may stand in a line from byte `begin` to the cursor.
struct Completion {
  size_t begin = 0;
  std::vector<std::string> candidates;
  bool adds_space = true;  // after a candidate that is the only one
};
/// Gets the line up to the cursor.
using Completer = std::function<Completion(std::string_view line)>;

class LineEditor {
 public:
  virtual ~LineEditor() = default;
  /// One line without its end, or several that were pasted. While it waits the terminal is in a mode of its
  /// own; afterwards it is as before. kInterrupted: a signal has come (interrupt.h).
  virtual ReadResult ReadLine(const std::string& prompt, std::string* line) = 0;
  /// Adds a message to the history and to its file.
  virtual void Remember(const std::string& message) = 0;
};

/// An editor on standard input and output, which are terminals. Null where this build has no libedit, or
/// where the terminal can't move its cursor (TERM is "dumb" or unset). `history_file`: read now and made when
/// needed, readable by its owner only; "": none.
std::unique_ptr<LineEditor> OpenLineEditor(const std::string& history_file, Completer completer);

/// XDG_STATE_HOME/moesaic/chat_history, else ~/.local/state/moesaic/chat_history; "" without a home.
std::string HistoryFile();

}  // namespace moesaic::app
