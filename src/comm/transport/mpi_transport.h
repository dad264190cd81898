// Messages by MPI: Open MPI 4.1 or newer, or SMPI. It uses MPI-3 point-to-point calls only.
//
// Faults, as MPI allows: errors of calls end the transfer with kUnavailable, but a dead peer is detected by
// the launcher alone, which ends the job. Without a launcher that does, transfers with a dead peer run into
// their time limits; failed() is always false. MPI cannot cancel sends: the buffer of a cancelled send that
// its peer has not received may be read until it does, and must stay allocated.
#pragma once

#include <mpi.h>

#include <memory>

#include "comm/transport/transport.h"

namespace moesaic::comm {

struct MpiTransportOptions {
  /// Largest MPI tag that is used; values above the library's own limit have no effect. A lower limit than
  /// that of Tag makes the transport spread tags over several duplicates of the communicator.
  int max_tag = kTagLimit - 1;
  /// All tags of messages must be below it. A lower limit needs fewer duplicates.
  Tag tag_limit = kTagLimit;
};

/// Collective over the ranks of `communicator`, which is duplicated. MPI must be initialized, and must not be
/// finalized before the transport is destroyed. Unimplemented when the limit of tags is below 2^20.
StatusOr<std::unique_ptr<Transport>> MakeMpiTransport(MPI_Comm communicator,
                                                      const MpiTransportOptions& options = {});

}  // namespace moesaic::comm
