#include "app/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "app/output.h"

namespace moesaic::app {
namespace {

constexpr int kBarWidth = 24;
constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr char kVariable[] = "MOESAIC_RANK_PROGRESS";
constexpr char kMark =
    '\x1e';  // begins a line of progress in the output of a rank; nothing follows: it ended

// The lines that are on the terminal, by rank. Any thread.
class Lines {
 public:
  void Set(int rank, std::string line) {
    const std::lock_guard lock(mutex_);
    lines_[rank] = std::move(line);
    Draw();
  }
  void Erase(int rank) {
    const std::lock_guard lock(mutex_);
    if (lines_.erase(rank) > 0) Draw();
  }

 private:
  void Draw() {
    std::string text = drawn_ > 1 ? fmt::format("\r\033[{}A", drawn_ - 1) : "\r";
    const bool alone = lines_.size() == 1 && lines_.begin()->first == 0;
    int count = 0;
    for (const auto& [rank, line] : lines_) {
      text += fmt::format("{}{}{}\033[K", count++ > 0 ? "\n" : "",
                          alone ? "" : fmt::format("rank {}: ", rank), line);
    }
    drawn_ = count;
    WriteNotice(text + (count > 0 ? "\033[J" : "\033[K\033[J"));
  }

  std::mutex mutex_;
  std::map<int, std::string> lines_;
  int drawn_ = 0;  // lines on the terminal
};

Lines& TerminalLines() {
  static Lines lines;
  return lines;
}

}  // namespace

Progress::Progress(std::string label)
    : label_(std::move(label)),
      sends_(std::getenv(kVariable) != nullptr),
      terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (drawn_ && sends_) WriteNotice(fmt::format("{}\n", kMark));
  if (drawn_ && !sends_) TerminalLines().Erase(0);
}

void Progress::Show(int64_t done, int64_t total, const std::string& note) {
  const auto now = std::chrono::steady_clock::now();
  if ((!terminal_ && !sends_) || total <= 0 || now < next_) return;
  next_ = now + kInterval;
  drawn_ = true;
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const int filled = static_cast<int>(share * kBarWidth);
  std::string line = fmt::format("{} [{}{}] {:3.0f}%  {}", label_, std::string(filled, '#'),
                                 std::string(kBarWidth - filled, '-'), share * 100, note);
  if (sends_) {
    WriteNotice(fmt::format("{}{}\n", kMark, line));
  } else {
    TerminalLines().Set(0, std::move(line));
  }
}

std::string RankProgressVariable() {
  return isatty(STDERR_FILENO) != 0 ? fmt::format("{}=1", kVariable) : "";
}

bool ShowRankProgress(int rank, std::string_view line) {
  if (!line.starts_with(kMark)) return false;
  if (line.size() == 1) {
    TerminalLines().Erase(rank);
  } else {
    TerminalLines().Set(rank, std::string(line.substr(1)));
  }
  return true;
}

}  // namespace moesaic::app
