// The line editor over libedit's wide-character interface.
#include <fcntl.h>
#include <fmt/format.h>
#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "app/interrupt.h"
#include "app/line_editor.h"
#include "app/output.h"
#include "app/utf8.h"

namespace moesaic::app {
namespace {

// Interval of checks for signals, window size and resumed jobs.
constexpr int kSignalPollMilliseconds = 100;
constexpr int kHistoryEntries = 1000;
constexpr std::string_view kHistoryCookie = "_HiStOrY_V2_\n";  // the first line of every history(3) file
constexpr const char* kPasteOn = "\033[?2004h";
constexpr const char* kPasteOff = "\033[?2004l";
constexpr std::wstring_view kPasteEnd = L"\033[201~";

// libedit displays and measures characters by the locale. Only its character set is taken from the
// environment.
void UseUtf8() {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(nl_langinfo(CODESET), "UTF-8") != 0) std::setlocale(LC_CTYPE, "C.UTF-8");
}

// Creates an empty history file of mode 0600, or removes the rights of others from an existing one.
bool PrepareFile(const std::string& path) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const bool made = std::filesystem::create_directories(folder, error);
  if (made) std::filesystem::permissions(folder, std::filesystem::perms::owner_all, error);
  const int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
  if (file < 0) return false;
  struct stat state = {};
  bool ours = fchmod(file, S_IRUSR | S_IWUSR) == 0 && fstat(file, &state) == 0 && S_ISREG(state.st_mode);
  if (ours && state.st_size == 0) {
    ours = write(file, kHistoryCookie.data(), kHistoryCookie.size()) == std::ssize(kHistoryCookie);
  }
  close(file);
  return ours;
}

// Encodes an entry as history(3) does: on one line, with vis(3)'s octal numbers.
std::string Encoded(const std::string& message) {
  std::string line;
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = byte > ' ' && byte != 0x7f && byte != '\\';
    line += plain ? std::string(1, c) : fmt::format("\\{:03o}", byte);
  }
  return line;
}

std::string CommonPrefix(const std::vector<std::string>& words) {
  std::string prefix = words.front();
  for (const std::string& word : words) {
    prefix.resize(std::mismatch(prefix.begin(), prefix.end(), word.begin(), word.end()).first -
                  prefix.begin());
  }
  return prefix;
}

class LibeditEditor : public LineEditor {
 public:
  LibeditEditor(std::string history_file, Completer completer)
      : history_file_(std::move(history_file)), completer_(std::move(completer)) {
    UseUtf8();
    history_ = history_winit();
    edit_ = el_init("moesaic", stdin, stdout, stderr);
    HistEventW event;
    history_w(history_, &event, H_SETSIZE, kHistoryEntries);
    history_w(history_, &event, H_SETUNIQUE, 1);
    el_wset(edit_, EL_CLIENTDATA, this);
    el_wset(edit_, EL_PROMPT, &LibeditEditor::Prompt);
    el_wset(edit_, EL_GETCFN, &LibeditEditor::GetCharacter);
    el_wset(edit_, EL_EDITOR, L"emacs");
    el_wset(edit_, EL_HIST, history_w, history_);
    el_wset(edit_, EL_ADDFN, L"moesaic-paste", L"Insert pasted text", &LibeditEditor::Paste);
    el_wset(edit_, EL_ADDFN, L"moesaic-complete", L"Complete a command or file name",
            &LibeditEditor::Complete);
    el_wset(edit_, EL_BIND, L"\\e[200~", L"moesaic-paste", nullptr);
    el_wset(edit_, EL_BIND, L"^I", L"moesaic-complete", nullptr);
    el_wset(edit_, EL_BIND, L"^R", L"em-inc-search-prev", nullptr);
    // Binds Home, End and Delete.
    el_wset(edit_, EL_BIND, L"\\e[1~", L"ed-move-to-beg", nullptr);
    el_wset(edit_, EL_BIND, L"\\e[4~", L"ed-move-to-end", nullptr);
    el_wset(edit_, EL_BIND, L"\\e[3~", L"ed-delete-next-char", nullptr);
    el_source(edit_, nullptr);  // reads ~/.editrc, whose bindings take precedence
    if (!history_file_.empty() && PrepareFile(history_file_)) {
      const int loaded = history_w(history_, &event, H_LOAD, history_file_.c_str());
      if (loaded > 2 * kHistoryEntries) history_w(history_, &event, H_SAVE, history_file_.c_str());
    } else {
      history_file_.clear();
    }
  }

  ~LibeditEditor() override {
    el_end(edit_);
    history_wend(history_);
  }

  ReadResult ReadLine(const std::string& prompt, std::string* line) override {
    prompt_ = FromUtf8(prompt);
    ioctl(STDIN_FILENO, TIOCGWINSZ, &window_);
    WriteOutput(kPasteOn);
    FlushOutput().IgnoreError();  // main reports it
    int count = 0;
    const wchar_t* text = el_wgets(edit_, &count);
    WriteOutput(kPasteOff);
    FlushOutput().IgnoreError();
    if (Interrupted()) return ReadResult::kInterrupted;
    if (text == nullptr || count <= 0) return ReadResult::kEnd;
    *line = ToUtf8({text, static_cast<size_t>(count)});
    while (!line->empty() && (line->back() == '\n' || line->back() == '\r')) line->pop_back();
    return ReadResult::kLine;
  }

  void Remember(const std::string& message) override {
    HistEventW event;
    if (history_w(history_, &event, H_ENTER, FromUtf8(message).c_str()) < 0 || history_file_.empty()) return;
    // Appends, because other processes may add to the file.
    FILE* file = std::fopen(history_file_.c_str(), "ae");
    if (file == nullptr) return;
    std::fputs((Encoded(message) + "\n").c_str(), file);
    std::fclose(file);
  }

 private:
  static LibeditEditor& Of(EditLine* edit) {
    void* self = nullptr;
    el_wget(edit, EL_CLIENTDATA, &self);
    return *static_cast<LibeditEditor*>(self);
  }

  static wchar_t* Prompt(EditLine* edit) { return Of(edit).prompt_.data(); }

  static int GetCharacter(EditLine* edit, wchar_t* c) { return Of(edit).Read(c); }

  // Returns 1 for a character, 0 at the end, -1 if interrupted.
  int Read(wchar_t* c) {
    for (;;) {
      while (at_ < pending_.size()) {
        char32_t code = 0;
        if (!decoder_.Push(static_cast<unsigned char>(pending_[at_++]), &code)) continue;
        *c = static_cast<wchar_t>(code);
        return 1;
      }
      pending_.clear();
      at_ = 0;
      if (Interrupted()) {
        errno = EINTR;
        return -1;
      }
      pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
      if (poll(&input, 1, kSignalPollMilliseconds) <= 0) {
        FollowTerminal();
        continue;
      }
      char buffer[4096];
      const ssize_t got = read(STDIN_FILENO, buffer, sizeof(buffer));
      if (got > 0) {
        pending_.assign(buffer, static_cast<size_t>(got));
      } else if (got == 0 || errno != EINTR) {
        return 0;
      }
    }
  }

  // Adapts to a changed window size and to the terminal mode that a shell sets for resumed jobs.
  void FollowTerminal() {
    winsize window = {};
    if (ioctl(STDIN_FILENO, TIOCGWINSZ, &window) == 0 &&
        (window.ws_col != window_.ws_col || window.ws_row != window_.ws_row)) {
      window_ = window;
      el_resize(edit_);
    }
    termios mode = {};
    if (tcgetattr(STDIN_FILENO, &mode) == 0 && (mode.c_lflag & ICANON) != 0) {
      el_wset(edit_, EL_PREP_TERM, 0);
      el_wset(edit_, EL_PREP_TERM, 1);
      el_wset(edit_, EL_REFRESH);
    }
  }

  static unsigned char Paste(EditLine* edit, wint_t) {
    LibeditEditor& self = Of(edit);
    std::wstring text;
    wchar_t c = 0;
    while (!text.ends_with(kPasteEnd)) {
      if (self.Read(&c) != 1) return CC_EOF;
      text.push_back(c);
    }
    text.resize(text.size() - kPasteEnd.size());
    std::ranges::replace(text, L'\r', L'\n');
    std::erase_if(text,
                  [](wchar_t one) { return (one < L' ' && one != L'\n' && one != L'\t') || one == 0x7f; });
    if (!text.empty() && el_winsertstr(edit, text.c_str()) != 0) return CC_REFRESH_BEEP;
    return CC_REFRESH;
  }

  static unsigned char Complete(EditLine* edit, wint_t) {
    const LineInfoW* info = el_wline(edit);
    const std::string line = ToUtf8({info->buffer, static_cast<size_t>(info->cursor - info->buffer)});
    const Completion found = Of(edit).completer_(line);
    if (found.candidates.empty()) return CC_REFRESH_BEEP;
    const std::string word = line.substr(found.begin);
    std::string rest = CommonPrefix(found.candidates).substr(word.size());
    if (found.adds_space && found.candidates.size() == 1) rest += ' ';
    if (!rest.empty()) {
      return el_winsertstr(edit, FromUtf8(rest).c_str()) == 0 ? CC_REFRESH : CC_REFRESH_BEEP;
    }
    std::string list = "\n";
    for (const std::string& candidate : found.candidates) list += candidate + "  ";
    WriteOutput(list + "\n");
    FlushOutput().IgnoreError();
    return CC_REDISPLAY;
  }

  std::string history_file_;
  const Completer completer_;
  EditLine* edit_ = nullptr;
  HistoryW* history_ = nullptr;
  std::wstring prompt_;
  winsize window_ = {};
  std::string pending_;  // bytes that were read but not decoded yet
  size_t at_ = 0;
  Utf8Decoder decoder_;
};

}  // namespace

std::unique_ptr<LineEditor> OpenLineEditor(const std::string& history_file, Completer completer) {
  const char* terminal = std::getenv("TERM");
  if (terminal == nullptr || *terminal == '\0' || std::strcmp(terminal, "dumb") == 0) return nullptr;
  return std::make_unique<LibeditEditor>(history_file, std::move(completer));
}

}  // namespace moesaic::app
