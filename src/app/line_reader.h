// Reads messages from stdin line by line and notices Ctrl-C while waiting. Without an editor the terminal
// mode is never changed.
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

  /// Reads one line without its end. Bytes typed ahead are kept.
  Result ReadLine(std::string* line);

  /// Reads one message: a line; lines joined by a trailing backslash; or all text between """ and """.
  /// `prompt` and `more` are shown before the first and before later lines if stdin and stdout are terminals.
  /// The editor remembers messages.
  Result ReadMessage(const std::string& prompt, const std::string& more, std::string* message);

 private:
  // Reads the next line of a message, after printing `prompt`.
  Result NextLine(const std::string& prompt, std::string* line);
  Result JoinLines(const std::string& prompt, const std::string& more, std::string* message);

  std::unique_ptr<LineEditor> editor_;
  std::string pending_;
  bool at_end_ = false;
};

}  // namespace moesaic::app
