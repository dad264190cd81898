#include "app/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

#include "app/interrupt.h"
#include "app/output.h"

namespace moesaic::app {
namespace {

constexpr const char* kQuotes = "\"\"\"";
// Interval of checks for a signal that arrived between the check and poll().
constexpr int kLinePollMilliseconds = 200;

void ShowPrompt(const std::string& prompt) {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0) return;
  WriteOutput(prompt);
  FlushOutput().IgnoreError();  // main reports it
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

LineReader::Result LineReader::ReadLine(std::string* line) {
  for (;;) {
    if (const size_t end = pending_.find('\n'); end != std::string::npos) {
      *line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      if (!line->empty() && line->back() == '\r') line->pop_back();
      return Result::kLine;
    }
    if (at_end_) {
      if (pending_.empty()) return Result::kEnd;
      line->swap(pending_);  // last line without a newline
      pending_.clear();
      return Result::kLine;
    }
    if (Interrupted()) return Result::kInterrupted;
    pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (poll(&input, 1, kLinePollMilliseconds) <= 0) continue;
    char buffer[4096];
    const ssize_t got = read(STDIN_FILENO, buffer, sizeof(buffer));
    if (got > 0) {
      pending_.append(buffer, static_cast<size_t>(got));
    } else if (got == 0 || errno != EINTR) {
      at_end_ = true;
    }
  }
}

LineReader::Result LineReader::NextLine(const std::string& prompt, std::string* line) {
  if (editor_ != nullptr) return editor_->ReadLine(prompt, line);
  ShowPrompt(prompt);
  return ReadLine(line);
}

LineReader::Result LineReader::ReadMessage(const std::string& prompt, const std::string& more,
                                           std::string* message) {
  const Result result = JoinLines(prompt, more, message);
  const bool is_blank = message->find_first_not_of(" \t\n") == std::string::npos;
  if (result == Result::kLine && editor_ != nullptr && !is_blank) editor_->Remember(*message);
  return result;
}

LineReader::Result LineReader::JoinLines(const std::string& prompt, const std::string& more,
                                         std::string* message) {
  message->clear();
  std::string line;
  Result result = NextLine(prompt, &line);
  if (result != Result::kLine) return result;
  if (line.rfind(kQuotes, 0) == 0) {
    line.erase(0, 3);
    while (!EndsWith(line, kQuotes)) {
      *message += line + "\n";
      result = NextLine(more, &line);
      if (result == Result::kInterrupted) return result;
      if (result == Result::kEnd) return Result::kLine;
    }
    *message += line.substr(0, line.size() - 3);
    return Result::kLine;
  }
  while (EndsWith(line, "\\")) {
    *message += line.substr(0, line.size() - 1) + "\n";
    result = NextLine(more, &line);
    if (result == Result::kInterrupted) return result;
    if (result == Result::kEnd) return Result::kLine;
  }
  *message += line;
  return Result::kLine;
}

}  // namespace moesaic::app
