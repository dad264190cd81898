// The processes of a job that this process starts on its own machine. Each runs this program with the same
// command line, and learns its rank from the environment.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace moesaic::app {

/// Rank 0 is the caller; ranks 1, 2, ... are its children. Children end when their parent does, even if it is
/// killed.
class LocalRanks {
 public:
  struct Options {
    int ranks = 2;
    /// Variables of all children, in addition to MOESAIC_RANK and MOESAIC_WORLD_SIZE: NAME=VALUE.
    std::vector<std::string> environment;
    /// Receives each line that a child writes, "rank 1: TEXT\n", and a line when a child is stopped or
    /// continues: "rank 1 (process 4711) was stopped by signal 19 (Stopped (signal))\n". Called by one
    /// thread.
    std::function<void(const std::string& line)> output;
  };
  /// Call it before the process has threads. Children read an empty standard input.
  static StatusOr<std::unique_ptr<LocalRanks>> Start(Options options);
  ~LocalRanks();  ///< kills the children that have not ended
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  /// The first child that failed: "rank 1 (process 4711) was killed by signal 9 (Killed)" or "... exited with
  /// code 1". Ok while all run or have exited with code 0. Any thread.
  Status Failure() const;
  /// Waits until all children have ended, and kills those that have not after `limit_s` seconds. Returns
  /// Failure(), where killed children count.
  Status Wait(double limit_s);
  /// Kills the child with this rank.
  void KillRank(int rank);
  /// Kills all children, whose remaining output is dropped.
  void Kill();

 private:
  struct Child {
    int rank = 0;
    int pid = -1;     // -1: has ended
    int output = -1;  // read end of its standard output and error; -1: closed
    std::string line;
  };
  explicit LocalRanks(Options options);
  Status Spawn(int rank, const std::vector<std::string>& words);
  void Watch();
  void ReportStop(const Child& child);
  void Forward(Child& child, std::string_view text);
  void Reap(Child& child);
  int Running() const;
  void KillRunning();

  Options options_;
  std::vector<Child> children_;  // pid is guarded by mutex_; the rest is used by the thread

  mutable std::mutex mutex_;
  Status failure_;
  bool killed_ = false;
  std::thread thread_;
};

}  // namespace moesaic::app
