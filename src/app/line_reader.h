// Reads messages from stdin line by line, so that Ctrl-C is seen while waiting. Without an editor the
// terminal is never put into another mode.
#pragma once

#include <memory>
#include <string>

#include "app/line_editor.h"

namespace moesaic::app {

class LineReader {
 public:
  using Result = ReadResult;

  /// `editor` may be null.
  explicit LineReader(std::unique_ptr<LineEditor> editor = nullptr) : editor_(std::move(editor)) {}

  /// One line without its end. Bytes that are typed ahead are kept.
  Result ReadLine(std::string* line);

  /// One message: a line; lines joined by a trailing backslash; or all between """ and """. `prompt` and
  /// `more` are shown before the first and before every other line when both ends are terminals. The editor
  /// remembers messages.
  Result ReadMessage(const std::string& prompt, const std::string& more, std::string* message);

 private:
  // The next line of a message, after `prompt`.
  Result NextLine(const std::string& prompt, std::string* line);
  Result JoinLines(const std::string& prompt, const std::string& more, std::string* message);

  std::unique_ptr<LineEditor> editor_;
  std::string pending_;
  bool at_end_ = false;
};

}  // namespace moesaic::app
