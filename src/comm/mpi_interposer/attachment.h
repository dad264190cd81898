// Our communicator over an MPI communicator, attached to it as an attribute.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/collectives/communicator.h"

namespace moesaic::comm {

struct Attachment {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Communicator> communicator;
  std::vector<std::byte> packed_input, packed_output;  // reused by all calls
};

/// The attachment of `comm`, which the first call on all its ranks creates. It is freed with the
/// communicator, or when MPI is finalized. Null where calls are passed through: intercommunicators, single
/// ranks, more than kMaxCommunicatorRanks, outside of MPI_Init and MPI_Finalize, or after an error, which is
/// printed once.
///
/// Nodes are found by MPI_Comm_split_type. MOESAIC_TOPOLOGY may name a file with the links of all ranks of
/// MPI_COMM_WORLD: its devices are assigned to ranks node by node, in the order of ranks within a node.
/// MOESAIC_COLLECTIVE_TUNING may name a file with a TuningTable.
Attachment* AttachmentOf(MPI_Comm comm);

/// Finds the node of each rank of MPI_COMM_WORLD, and registers the callbacks that free attachments. All
/// ranks call it after MPI_Init.
void Prepare();

}  // namespace moesaic::comm
