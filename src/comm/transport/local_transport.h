// Ranks that are threads of this process. A message is copied once, from the sender's buffer to the
// receiver's: by the receiver if it comes second or every rank has a core, otherwise by the sender. Faults
// are injected by Kill(). LocalOptions::topology turns real time into virtual time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/topology/topology.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

class LocalEnd;
struct LocalShared;

struct LocalOptions {
  /// If set, messages take the time that this topology gives them, and Now() is virtual: it advances when
  /// every rank is in Idle() or has left. A message starts when both sides have posted it. Copies and
  /// computation take no time. The topology must have as many ranks as the job and must outlive it.
  const Topology* topology = nullptr;
  /// Messages that arrive within this virtual time after another one arrive together with it. This makes
  /// simulations of many ranks faster.
  double quantum_s = 0;
};

/// A job of `ranks` ranks. Ends are used by one thread each; Kill() may be called by any thread.
class LocalJob {
 public:
  explicit LocalJob(int ranks, LocalOptions options = {});
  ~LocalJob();
  LocalJob(const LocalJob&) = delete;
  LocalJob& operator=(const LocalJob&) = delete;

  int ranks() const;
  /// Returns the transport of a rank. It lives as long as the job.
  Transport& end(int rank);

  /// Makes the rank die: its transfers and those of its peers with it end with kUnavailable, and later ones
  /// fail at once.
  void Kill(int rank);
  /// Makes the rank die instead of starting its send number `sends`, counted from 0 and from the start of the
  /// job. Must be called before the ranks run.
  void KillAtSend(int rank, int64_t sends);
  /// Declares that the rank makes no more calls, so that virtual time does not wait for it.
  void Leave(int rank);
  /// Called by the rank's thread in virtual time: computes for `seconds`, while its messages advance.
  void Compute(int rank, double seconds);

 private:
  std::unique_ptr<LocalShared> shared_;
  std::vector<std::unique_ptr<LocalEnd>> ends_;
};

/// Runs `body` on one thread per rank, each with its transport, and waits for all of them. Ranks leave when
/// `body` returns.
void RunRanks(LocalJob& job, const std::function<void(Transport&)>& body);
void RunRanks(int ranks, const std::function<void(Transport&)>& body, LocalOptions options = {});

}  // namespace moesaic::comm
