// Waiting of a thread that polls. On one core's two hardware threads, a rank that polls without pauses slows
// the rank that it waits for.
#pragma once

namespace moesaic::comm {

class IdleBackoff {
 public:
  /// Waits between two polls: some pauses of the processor at first (about 20 us), then a yield each (about 2
  /// ms), then a sleep of some 20 us each.
  void Wait();
  /// Something was received: the next messages follow soon.
  void Reset() { waits_ = 0; }

 private:
  int waits_ = 0;  // since the reset
};

}  // namespace moesaic::comm
