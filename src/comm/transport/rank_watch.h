// Watches the processes of a job. A thread of each rank answers rank 0, also while the rank computes: only a
// process that is stopped, or whose host is unreachable or has no processor for it, is silent.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "comm/transport/rendezvous.h"
#include "comm/transport/socket.h"

namespace moesaic::comm {

/// Rank 0 probes the other ranks four times a second and reports those that have not answered for 1.2 s. It
/// ends nothing. A process that has ended is not reported: transports notice it.
class RankWatch {
 public:
  /// `connections` are those that Rendezvous() kept. `report` is called by the thread of rank 0; other ranks
  /// do not use it. ResourceExhausted: no thread can be started.
  static StatusOr<std::unique_ptr<RankWatch>> Start(int rank, std::vector<Socket> connections,
                                                    SilenceReport report);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

 private:
  RankWatch(std::vector<Socket> connections, SilenceReport report)
      : connections_(std::move(connections)), report_(std::move(report)) {}
  void ProbeRanks();    // on rank 0
  void AnswerProbes();  // on the other ranks

  const std::vector<Socket> connections_;  // by rank
  const SilenceReport report_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ends_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace moesaic::comm
