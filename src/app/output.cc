#include "app/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
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

void WriteBuffered() {
  if (output_error == 0) output_error = WriteAll(STDOUT_FILENO, buffered);
  buffered.clear();
}

}  // namespace

int WriteAll(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    pollfd output = {.fd = descriptor, .events = POLLOUT, .revents = 0};
    size_t count = bytes.size();
    if (Interrupted()) {
      if (poll(&output, 1, kBlockedMilliseconds) <= 0) return EINTR;
      count = std::min<size_t>(count, PIPE_BUF);  // a pipe that is ready takes that much without blocking
    }
    const ssize_t written = write(descriptor, bytes.data(), count);
    if (written > 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (written == 0) {
      return EIO;
    } else if (errno == EAGAIN) {
      poll(&output, 1, -1);  // another process made the file non-blocking
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

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
  if (output_error == EINTR) return Cancelled("interrupted");
  return IoError("cannot write to standard output: {}", std::strerror(output_error));
}

void WriteNotice(std::string_view text) { WriteAll(STDERR_FILENO, text); }

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
