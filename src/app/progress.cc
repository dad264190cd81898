#include "app/progress.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "app/output.h"

namespace moesaic::app {
namespace {

constexpr int kBarWidth = 24;
constexpr auto kInterval = std::chrono::milliseconds(100);

}  // namespace

Progress::Progress(std::string label) : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (drawn_) WriteNotice("\r\033[K");
}

void Progress::Show(int64_t done, int64_t total, const std::string& note) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || total <= 0 || now < next_) return;
  next_ = now + kInterval;
  drawn_ = true;
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const int filled = static_cast<int>(share * kBarWidth);
  Tell("\r{} [{}{}] {:3.0f}%  {}\033[K", label_, std::string(filled, '#'),
       std::string(kBarWidth - filled, '-'), share * 100, note);
}

}  // namespace moesaic::app
