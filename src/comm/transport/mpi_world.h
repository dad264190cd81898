// The MPI job of this process, without mpi.h.
#pragma once

#include "comm/transport/opened_transport.h"

namespace moesaic::comm {

/// Opens a transport over MPI_COMM_WORLD. It initializes MPI if no other part of the program has, and then
/// finalizes it when the transport is destroyed. MPI can be initialized only once in a process.
StatusOr<OpenedTransport> OpenMpiWorld();

}  // namespace moesaic::comm
