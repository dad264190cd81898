// A progress line on stderr, drawn only when that is a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace moesaic::app {

/// "label [#######---------] 43%  note". Redrawn at most ten times a second; wiped by the destructor.
class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(int64_t done, int64_t total, const std::string& note);

 private:
  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace moesaic::app
