#include "app/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>

#include "app/interrupt.h"

namespace moesaic::app {
namespace {

constexpr size_t kOutputBufferBytes = size_t{64} << 10;
// Time for a reader of the output to make room after Ctrl-C.
constexpr int kBlockedMilliseconds = 200;

int output_error = 0;  // errno of the first failed write
std::string buffered;

// Writes the buffer. A signal does not lose output, but ends a write whose reader makes no room.
void WriteBuffered() {
  size_t done = 0;
  while (output_error == 0 && done < buffered.size()) {
    const ssize_t written = write(STDOUT_FILENO, buffered.data() + done, buffered.size() - done);
    if (written >= 0) {
      done += static_cast<size_t>(written);
      continue;
    }
    const int error = errno;
    pollfd output = {.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
    const bool again = error == EINTR && (!Interrupted() || poll(&output, 1, kBlockedMilliseconds) != 0);
    if (!again) output_error = error;
  }
  buffered.clear();
}

}  // namespace

void WriteOutput(std::string_view text) {
  if (output_error != 0) return;
  static const bool is_terminal = isatty(STDOUT_FILENO) != 0;
  buffered += text;
  const bool ends_line = is_terminal && text.find('\n') != std::string_view::npos;
  if (ends_line || buffered.size() >= kOutputBufferBytes) WriteBuffered();
}

Status FlushOutput() {
  WriteBuffered();
  if (output_error == 0) return OkStatus();
  return IoError("cannot write to standard output: {}", std::strerror(output_error));
}

void WriteNotice(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void PrepareStreams() {
  // The opposite access mode of each stream: reading or writing fails with EBADF, as if it were closed.
  constexpr int kContraryModes[] = {O_WRONLY, O_RDONLY, O_RDONLY};
  for (int descriptor = 0; descriptor < 3; ++descriptor) {
    // open() returns the lowest free number, which is this one.
    if (fcntl(descriptor, F_GETFD) == -1 && errno == EBADF) open("/dev/null", kContraryModes[descriptor]);
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace moesaic::app
