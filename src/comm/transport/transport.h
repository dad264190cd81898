// Point-to-point messages between the ranks of a job. Implementations: threads of this process
// (local_transport.h), MPI (mpi_transport.h) and UCX (ucx_transport.h). An NCCL transport has the same
// interface: buffers on a device are spans, too, and Progress() polls its streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::comm {

/// Separates messages between two ranks; below 2^30. Messages of one (sender, receiver, tag) are matched in
/// order.
using Tag = uint32_t;
inline constexpr Tag kTagLimit = Tag{1} << 30;

/// A send or receive that was started. A value of one transport; invalid once Test() reported its end.
struct TransferId {
  uint32_t slot = 0;
  uint32_t generation = 0;
};

/// One rank's side of the job. All calls come from one thread at a time.
///
/// Faults: a transfer with a dead peer ends with kUnavailable, whose message names the rank; transfers with
/// other ranks continue. Both sides know the size of a message: one that is longer or shorter than its
/// receive buffer ends the receive with kInvalidArgument. docs/contracts/comm.md states how fast each
/// transport detects a dead peer.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;  ///< "local", "mpi" or "ucx"
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Starts to send `data`, which is borrowed until the transfer ends. `peer` may be rank() itself.
  virtual StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) = 0;
  /// Like Send, for a rank that computes next and seldom calls Progress(). If the transport has a protocol
  /// that needs no answer of the receiver, it uses this protocol, which may copy the message.
  virtual StatusOr<TransferId> SendAhead(int peer, Tag tag, std::span<const std::byte> data) {
    return Send(peer, tag, data);
  }
  /// Starts to receive exactly data.size() bytes into `data`, which is borrowed until the transfer ends.
  virtual StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) = 0;
  /// Sends `data` to the peer, receives exactly received.size() bytes from it, and returns when both have
  /// ended. Equals Send(), Receive() and waiting for them, on either side. kDeadlineExceeded, after Cancel(),
  /// when it takes longer than `limit_s` seconds.
  virtual Status Exchange(int peer, Tag tag, std::span<const std::byte> data, std::span<std::byte> received,
                          double limit_s);
  /// Advances all transfers; never blocks.
  virtual void Progress() = 0;
  /// Returns true when the transfer has ended. `*result` is then its status, and the id is invalid.
  virtual bool Test(TransferId id, Status* result) = 0;
  /// Ends the transfer early: its buffer is not touched after the call returns. A message that was sent in
  /// part may still arrive; the pair's later messages under other tags are not affected.
  virtual void Cancel(TransferId id) = 0;

  /// Returns the maximum size of messages whose sends usually end before their receives are posted. A caller
  /// that has both to start begins with the sends of such messages, and with the receives of larger ones.
  virtual size_t EagerBytes() const;

  /// Returns whether the peer is known to be dead.
  virtual bool failed(int peer) const = 0;
  /// Returns the seconds for which the peer has not answered a query of the transport. Some transports send
  /// queries while no transfer ends; others return 0. A silent peer is stopped, unreachable or busy. For one
  /// that was given up for it, failed() is true, and the seconds are those until then. A dead peer has 0.
  virtual double SilentSeconds(int peer) const;
  /// Returns the seconds since a fixed point, by the clock of time limits. The clock is virtual if delivery
  /// is simulated.
  virtual double Now() const = 0;
  /// Called before a rank ends with a failure. Where peers can't notice the end of a process (MPI), this ends
  /// all processes of the job, with exit code 1, and does not return.
  virtual void EndJob() {}
  /// Called by a rank that has nothing to do until a transfer advances. The default yields the processor.
  virtual void Idle();
};

/// Returns the end of the message of an expired time limit: "; silent: rank 2 (4.5 s)" lists the peers that
/// have been silent for at least kSilentSeconds. Empty if there are none.
inline constexpr double kSilentSeconds = 1;
std::string SilentPeers(const Transport& transport);

/// Waits for the transfer; kDeadlineExceeded, after Cancel(), when it takes longer than `limit_s` seconds.
Status Wait(Transport& transport, TransferId id, double limit_s);

}  // namespace moesaic::comm
