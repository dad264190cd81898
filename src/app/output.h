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

/// Writes all bytes to a file and returns 0, or the errno of the failure. A signal loses nothing, but ends
/// the write, with EINTR, if Interrupted() and the file takes no more bytes: a reader has stopped reading.
/// Any thread may call it.
int WriteAll(int descriptor, std::string_view bytes);

/// Writes to standard output, buffered. Writes nothing after a failure. This and FlushOutput must be called
/// by one thread.
void WriteOutput(std::string_view text);

template <typename... Args>
void Print(fmt::format_string<Args...> format, Args&&... args) {
  WriteOutput(fmt::format(format, std::forward<Args>(args)...));
}

/// Flushes the buffer. Returns the error of the first failed write, for example "cannot write to standard
/// output: No space left on device"; Cancelled if an interrupt ended it.
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
