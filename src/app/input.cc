#include "app/input.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "app/interrupt.h"

namespace moesaic::app {
namespace {

// Interval of checks for a signal that arrived between the check and poll().
constexpr int kPollMilliseconds = 200;

StatusOr<std::string> ReadStandardInput() {
  std::string text;
  for (;;) {
    if (Interrupted()) return Cancelled("interrupted");
    pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    const int ready = poll(&input, 1, kPollMilliseconds);
    if (ready == 0) continue;
    char buffer[1 << 16];
    const ssize_t got = ready < 0 ? -1 : read(STDIN_FILENO, buffer, sizeof(buffer));
    if (got == 0) return text;
    if (got > 0) {
      text.append(buffer, static_cast<size_t>(got));
    } else if (errno != EINTR) {
      return IoError("standard input: cannot be read: {}", std::strerror(errno));
    }
  }
}

int32_t ParseId(std::string text) {
  absl::StripAsciiWhitespace(&text);
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) {
    FailUsage("--ids", fmt::format("must be token ids such as 1,2,3, found \"{}\"", text));
  }
  int32_t id = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), id).ec != std::errc()) {
    FailUsage("--ids", fmt::format("token id {} is out of range", text));
  }
  return id;
}

}  // namespace

std::string InputName(const std::string& path) { return path == kStandardInput ? "standard input" : path; }

std::string CheckExistingInput(std::string& path) {
  return path == kStandardInput ? std::string() : CheckExistingFile(path);
}

Flag AddIdsFlag(Verb& verb, std::vector<int32_t>& ids) {
  // CLI11's own delimiter would drop an empty id between two commas.
  const auto parse = [&ids](const std::vector<std::string>& lists) {
    for (const std::string& list : lists) {
      for (const auto id : absl::StrSplit(list, ',')) ids.push_back(ParseId(std::string(id)));
    }
  };
  return verb
      .AddOptionFunction<std::vector<std::string>>("--ids", parse,
                                                   "Token ids of one prompt, separated by commas")
      .TypeName("INT")
      .OneValue();
}

StatusOr<std::string> ReadInput(const std::string& path) {
  if (path == kStandardInput) return ReadStandardInput();
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("{}: cannot be opened: {}", path, std::strerror(errno));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return IoError("{}: cannot be read", path);
  return text;
}

}  // namespace moesaic::app
