#include "comm/mpi_interposer/mpi_types.h"

#include <array>

namespace moesaic::comm {
namespace {

// Integers of equal size have one dtype: sums and products of unsigned ones have the same bits.
std::optional<tensor::DType> IntegerOfSize(int bytes) {
  switch (bytes) {
    case 1:
      return tensor::DType::kI8;
    case 4:
      return tensor::DType::kI32;
    case 8:
      return tensor::DType::kI64;
    default:
      return std::nullopt;
  }
}

std::optional<tensor::DType> RealOfSize(int bytes) {
  if (bytes == 4) return tensor::DType::kF32;
  if (bytes == 8) return tensor::DType::kF64;
  return std::nullopt;
}

template <size_t count>
bool IsOneOf(MPI_Datatype type, const std::array<MPI_Datatype, count>& types) {
  for (MPI_Datatype each : types) {
    if (type == each) return true;
  }
  return false;
}

std::optional<tensor::DType> DTypeOf(MPI_Datatype type, bool signed_order) {
  int bytes = 0;
  if (type == MPI_FLOAT || type == MPI_DOUBLE || type == MPI_REAL || type == MPI_DOUBLE_PRECISION) {
    PMPI_Type_size(type, &bytes);  // a Fortran compiler may have other sizes
    return RealOfSize(bytes);
  }
  if (type == MPI_UNSIGNED_CHAR || type == MPI_UINT8_T) return tensor::DType::kU8;
  const bool is_signed =
      IsOneOf(type, std::array{MPI_INT, MPI_LONG, MPI_LONG_LONG, MPI_SIGNED_CHAR, MPI_INTEGER, MPI_INT8_T,
                               MPI_INT32_T, MPI_INT64_T, MPI_AINT, MPI_COUNT});
  // Open MPI 4.1 orders MPI_OFFSET as an unsigned type.
  const bool is_unsigned = IsOneOf(type, std::array{MPI_UNSIGNED, MPI_UNSIGNED_LONG, MPI_UNSIGNED_LONG_LONG,
                                                    MPI_UINT32_T, MPI_UINT64_T, MPI_OFFSET});
  if (!is_signed && (!is_unsigned || signed_order)) return std::nullopt;
  PMPI_Type_size(type, &bytes);
  return IntegerOfSize(bytes);
}

bool IsPredefined(int combiner) {
  return combiner == MPI_COMBINER_NAMED || combiner == MPI_COMBINER_F90_REAL ||
         combiner == MPI_COMBINER_F90_COMPLEX || combiner == MPI_COMBINER_F90_INTEGER;
}

// Returns whether the type is a named one, or made of nothing but repetitions of one.
bool IsRepeated(MPI_Datatype type) {
  int integers = 0, addresses = 0, types = 0, combiner = 0;
  PMPI_Type_get_envelope(type, &integers, &addresses, &types, &combiner);
  if (combiner == MPI_COMBINER_NAMED) return true;
  if (combiner != MPI_COMBINER_CONTIGUOUS && combiner != MPI_COMBINER_DUP) return false;
  int count = 0;
  MPI_Aint none = 0;
  MPI_Datatype inner = MPI_DATATYPE_NULL;
  PMPI_Type_get_contents(type, integers, addresses, types, &count, &none, &inner);
  const bool is_repeated = IsRepeated(inner);
  PMPI_Type_get_envelope(inner, &integers, &addresses, &types, &combiner);
  if (!IsPredefined(combiner)) PMPI_Type_free(&inner);  // the contents are references of ours
  return is_repeated;
}

}  // namespace

std::optional<Reduction> ReductionOf(MPI_Datatype type, MPI_Op op) {
  Reduction reduction;
  if (op == MPI_SUM) {
    reduction.op = ReduceOp::kSum;
  } else if (op == MPI_PROD) {
    reduction.op = ReduceOp::kProduct;
  } else if (op == MPI_MIN) {
    reduction.op = ReduceOp::kMin;
  } else if (op == MPI_MAX) {
    reduction.op = ReduceOp::kMax;
  } else {
    return std::nullopt;
  }
  const bool signed_order = op == MPI_MIN || op == MPI_MAX;
  const std::optional<tensor::DType> dtype = DTypeOf(type, signed_order);
  if (!dtype.has_value()) return std::nullopt;
  reduction.dtype = *dtype;
  reduction.element_bytes = tensor::BlockOf(*dtype).bytes;
  return reduction;
}

TypeLayout LayoutOf(MPI_Datatype type) {
  MPI_Count bytes = 0;
  MPI_Aint lower = 0, extent = 0;
  PMPI_Type_size_x(type, &bytes);
  PMPI_Type_get_extent(type, &lower, &extent);
  return {bytes, extent, bytes == extent && lower == 0 && IsRepeated(type)};
}

}  // namespace moesaic::comm
