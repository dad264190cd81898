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

/// Writes all bytes to an open file. Returns 0, or the errno of the failed write. Signals lose no bytes.
/// After an interrupt (Interrupted()), a write that blocks for 0.2 s, because a pipe's reader has stopped
/// reading, ends with EINTR. Any thread may call it.
int WriteAll(int descriptor, std::string_view bytes);

/// Writes to standard output. On a terminal the text appears with its next end of line; otherwise a buffer of
/// 64 KiB is filled first. After a failed write it does nothing. Not thread-safe: only one thread may call
/// it, Print and FlushOutput.
void WriteOutput(std::string_view text);

/// Formats and calls WriteOutput.
template <typename... Args>
void Print(fmt::format_string<Args...> format, Args&&... args) {
  WriteOutput(fmt::format(format, std::forward<Args>(args)...));
}

/// Flushes the buffer. Returns the error of the first failed write, for example "cannot write to standard
/// output: No space left on device"; Cancelled if an interrupt ended it.
Status FlushOutput();

/// Writes to standard error, unbuffered.
void WriteNotice(std::string_view text);

/// Formats and calls WriteNotice.
template <typename... Args>
void Tell(fmt::format_string<Args...> format, Args&&... args) {
  WriteNotice(fmt::format(format, std::forward<Args>(args)...));
}

/// Reserves the numbers of standard streams that the caller closed, so that no other file gets them and
/// reading or writing them fails with EBADF. Also ignores SIGXFSZ, so that a write beyond a file size limit
/// fails instead of ending the process. main() calls it before it opens a file.
void PrepareStreams();

}  // namespace moesaic::app
