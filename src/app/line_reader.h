// Reads messages from stdin line by line, so that Ctrl-C is seen while waiting and the terminal is never put
// into another mode.
#pragma once

#include <string>

namespace moesaic::app {

class LineReader {
 public:
  enum class Result { kLine, kEnd, kInterrupted };

  /// One line without its end. Bytes that are typed ahead are kept.
  Result ReadLine(std::string* line);

  /// One message: a line; lines joined by a trailing backslash; or all between """ and """. `prompt` and
  /// `more` are shown before the first and before every other line when both ends are terminals.
  Result ReadMessage(const std::string& prompt, const std::string& more, std::string* message);

 private:
  std::string pending_;
  bool at_end_ = false;
};

}  // namespace moesaic::app
