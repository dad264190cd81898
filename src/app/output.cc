#include "app/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace moesaic::app {
namespace {

int output_error = 0;  // errno of the first failed write

void Note(bool written) {
  if (!written && output_error == 0) output_error = errno != 0 ? errno : EIO;
}

}  // namespace

void WriteOutput(std::string_view text) {
  if (output_error != 0) return;
  errno = 0;
  Note(std::fwrite(text.data(), 1, text.size(), stdout) == text.size());
}

Status FlushOutput() {
  if (output_error == 0) {
    errno = 0;
    Note(std::fflush(stdout) == 0);
  }
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
