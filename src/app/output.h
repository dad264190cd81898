// Writes the output of verbs: results to standard output, everything else to standard error.
//
// A result that is not written is a failure. Therefore only these functions write to standard output, and
// main calls FlushOutput at the end. Failed writes to standard error are ignored.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "base/status.h"

namespace moesaic::app {

/// Writes to standard output, buffered. Writes nothing after a failure.
void WriteOutput(std::string_view text);

template <typename... Args>
void Print(fmt::format_string<Args...> format, Args&&... args) {
  WriteOutput(fmt::format(format, std::forward<Args>(args)...));
}

/// Flushes the buffer. Returns the error of the first failed write, for example "cannot write to standard
/// output: No space left on device".
Status FlushOutput();

/// Writes to standard error, unbuffered.
void WriteNotice(std::string_view text);

template <typename... Args>
void Tell(fmt::format_string<Args...> format, Args&&... args) {
  WriteNotice(fmt::format(format, std::forward<Args>(args)...));
}

/// Opens standard streams that the caller closed, so that no other file gets their numbers and uses of them
/// fail. Also makes writes beyond a file size limit fail instead of ending the process. Must be called first.
void PrepareStreams();

}  // namespace moesaic::app
