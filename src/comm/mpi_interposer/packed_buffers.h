// Buffers of MPI calls as consecutive bytes in the order of ranks.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/mpi_interposer/mpi_types.h"

namespace moesaic::comm {

/// Parts of a buffer, one for each rank: `counts[i]` elements of `type` from displacement `displacements[i]`,
/// in elements.
struct PartList {
  MPI_Datatype type = MPI_BYTE;
  std::vector<int64_t> counts, displacements;

  /// Returns adjacent parts of equal counts.
  static PartList Equal(MPI_Datatype type, int parts, int64_t count);
  static PartList Placed(MPI_Datatype type, std::span<const int> counts, std::span<const int> displacements);

  int64_t Elements() const;
};

/// Sets `packed` to the bytes of all parts, in the order of ranks. It is a view of `buffer` where that
/// already has this form; otherwise the parts are packed into `staging`. An error of MPI, such as a type that
/// is not committed, is returned after the error handler of `comm` was called.
int Pack(const void* buffer, const PartList& parts, MPI_Comm comm, std::vector<std::byte>& staging,
         std::span<const std::byte>& packed);

/// Sets `packed` to the destination of consecutive bytes: the buffer itself where it has this form, otherwise
/// `staging`, from which Unpack() fills the buffer. Errors are those of Pack().
int Destination(void* buffer, const PartList& parts, MPI_Comm comm, std::vector<std::byte>& staging,
                std::span<std::byte>& packed);
int Unpack(std::span<const std::byte> packed, void* buffer, const PartList& parts, MPI_Comm comm);

}  // namespace moesaic::comm
