// Progress lines on stderr, drawn only when that is a terminal: one of this process, and one for each rank
// that it started.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace moesaic::app {

/// Draws "label [#######---------] 43%  note", at most ten times a second. The destructor erases it. A rank
/// that another process started sends its line to that process instead.
class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(int64_t done, int64_t total, const std::string& note);

 private:
  std::string label_;
  bool sends_;  // to the process that started this rank
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point next_{};
};

/// NAME=VALUE for the environment of started ranks, which then send their progress; "": stderr is no
/// terminal.
std::string RankProgressVariable();
/// Draws the progress of a rank if `line`, from its output, has it. False: the line is other output.
bool ShowRankProgress(int rank, std::string_view line);

}  // namespace moesaic::app
