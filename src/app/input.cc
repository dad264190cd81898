#include "app/input.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "app/interrupt.h"

namespace moesaic::app {
namespace {

// A signal between the look at its flag and poll() would be slept over: look again this often.
constexpr int kPollMilliseconds = 200;

StatusOr<std::string> ReadStandardInput() {
  std::string text;
  for (;;) {
    if (Interrupted()) return Cancelled("interrupted");
    pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (poll(&input, 1, kPollMilliseconds) <= 0) continue;
    char buffer[1 << 16];
    const ssize_t got = read(STDIN_FILENO, buffer, sizeof(buffer));
    if (got == 0) return text;
    if (got > 0) {
      text.append(buffer, static_cast<size_t>(got));
    } else if (errno != EINTR) {
      return IoError("standard input: cannot be read: {}", std::strerror(errno));
    }
  }
}

}  // namespace

std::string InputName(const std::string& path) { return path == kStandardInput ? "standard input" : path; }

CLI::Validator ExistingInput() {
  return CLI::Validator(
      [](std::string& path) { return path == kStandardInput ? std::string() : CLI::ExistingFile(path); }, "");
}

CLI::Option* AddIdsFlag(CLI::App& verb, std::vector<int32_t>& ids) {
  return verb.add_option("--ids", ids, "Token ids of one prompt, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Validator(
          [](std::string& id) {
            const bool digits = !id.empty() && id.find_first_not_of("0123456789") == std::string::npos;
            return digits ? std::string() : fmt::format("must be token ids such as 1,2,3, found \"{}\"", id);
          },
          ""));
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
