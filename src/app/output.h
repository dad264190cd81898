// Where verbs write: results to standard output, everything else to standard error.
//
// A result that does not arrive is a failure, so what goes to standard output is written here alone, and main
// asks FlushOutput at the end. Standard error is for people: nothing fails because nobody can read it.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "base/status.h"

namespace moesaic::app {

/// Writes to standard output, buffered. After a failure nothing more is written.
void WriteOutput(std::string_view text);

template <typename... Args>
void Print(fmt::format_string<Args...> format, Args&&... args) {
  WriteOutput(fmt::format(format, std::forward<Args>(args)...));
}

/// Writes out what is buffered. Fails when that or any write before did, with the reason of the first:
/// "cannot write to standard output: No space left on device".
Status FlushOutput();

/// Writes to standard error, at once.
void WriteNotice(std::string_view text);

template <typename... Args>
void Tell(fmt::format_string<Args...> format, Args&&... args) {
  WriteNotice(fmt::format(format, std::forward<Args>(args)...));
}

/// Makes standard streams that the caller closed ones that fail, so that no file which is opened later takes
/// their place, and lets writing to a file beyond a limit fail instead of ending the process. Called first.
void PrepareStreams();

}  // namespace moesaic::app
