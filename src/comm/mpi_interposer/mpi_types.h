// Translates MPI datatypes and operations to those of src/comm/collectives.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <optional>

#include "comm/collectives/reduce_kernels.h"
#include "tensor/dtype.h"

namespace moesaic::comm {

struct Reduction {
  tensor::DType dtype = tensor::DType::kF32;
  int element_bytes = 4;
  ReduceOp op = ReduceOp::kSum;
};

/// Returns the reduction. Empty for types and operations that the collectives do not have: user-defined ones,
/// pairs, complex numbers, and MIN and MAX of unsigned types of more than 8 bits and of MPI_OFFSET.
std::optional<Reduction> ReductionOf(MPI_Datatype type, MPI_Op op);

struct TypeLayout {
  int64_t bytes = 0;           // data bytes of one element
  int64_t extent = 0;          // bytes from one element to the next
  bool is_contiguous = false;  // true if elements and their data have no gaps
};
TypeLayout LayoutOf(MPI_Datatype type);

}  // namespace moesaic::comm
