#include "quantizer/format/runtime_matrix.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "base/round.h"
#include "checkpoint/stored_groups.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::LinearSource;
using checkpoint::TensorEntry;
using checkpoint::WeightScheme;
using tensor::PackedFormat;

// Rows per task: whole panels and whole FP8 blocks.
constexpr int kBand = 128;
// Maximum number of inputs that int8 kernels can sum (tensor/packed.h).
constexpr int kInt8Inputs = 65536;

// Returns the packed format that the loader gives a linear on `grid` with k inputs; bf16 if no format holds
// it.
PackedFormat FormatOf(const Grid& grid, int k) {
  switch (grid.kind) {
    case GridKind::kInt8Channel:
      return k <= kInt8Inputs ? PackedFormat::kI8 : PackedFormat::kBF16;
    case GridKind::kInt4Group:
      return PackedFormat::kI4G32;
    case GridKind::kInt8Group:
      return PackedFormat::kI8G32;
    case GridKind::kNvfp4:
      return PackedFormat::kNvfp4;
    case GridKind::kFp8Block:
      break;
  }
  return PackedFormat::kF8G128;
}

WeightScheme SchemeOf(GridKind kind) {
  switch (kind) {
    case GridKind::kInt8Channel:
      return WeightScheme::kInt8Channel;
    case GridKind::kInt4Group:
    case GridKind::kInt8Group:
      return WeightScheme::kIntPacked;
    case GridKind::kNvfp4:
      return WeightScheme::kNvfp4;
    case GridKind::kFp8Block:
      break;
  }
  return WeightScheme::kFp8Block;
}

TensorEntry EntryOf(const StoredTensor& stored, int64_t rows, const std::byte* bytes) {
  TensorEntry entry{
      .name = stored.suffix, .dtype = stored.dtype, .shape = stored.shape, .bytes = {}, .file = ""};
  entry.shape[0] = (rows + stored.outputs_per_row - 1) / stored.outputs_per_row;
  entry.bytes = {bytes, static_cast<size_t>(entry.shape[0] * stored.row_bytes())};
  return entry;
}

// Calls body(first, count) for bands of `rows` rows and returns the first failure.
template <typename Body>
Status ForBands(runtime::ThreadPool& pool, int rows, const Body& body) {
  std::mutex mutex;
  Status failure;
  pool.Run(base::CeilDiv(rows, kBand), [&](int64_t band, int) {
    const int first = static_cast<int>(band) * kBand;
    Status status = body(first, std::min(kBand, rows - first));
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure.ok()) failure = std::move(status);
  });
  return failure;
}

}  // namespace

StatusOr<RuntimeMatrix> RuntimeMatrix::Create(PackedFormat format, int n, int k) {
  RuntimeMatrix matrix;
  const tensor::PackedLayout layout = tensor::PackedLayout::Of(format, n, k);
  ASSIGN_OR_RETURN(matrix.owned_.memory,
                   runtime::Buffer::Allocate(static_cast<size_t>(layout.total_bytes), /*huge=*/true));
  matrix.owned_.matrix = {.layout = layout, .data = matrix.owned_.memory.data()};
  return matrix;
}

StatusOr<RuntimeMatrix> RuntimeMatrix::OfRounded(const Grid& grid, int n, int k) {
  return Create(FormatOf(grid, k), n, k);
}

StatusOr<RuntimeMatrix> RuntimeMatrix::OfKept(tensor::DType dtype, int n, int k) {
  return Create(dtype == tensor::DType::kF32 ? PackedFormat::kF32 : PackedFormat::kBF16, n, k);
}

int64_t RuntimeMatrix::Bytes(const Grid& grid, int n, int k) {
  return tensor::PackedLayout::Of(FormatOf(grid, k), n, k).total_bytes;
}

Status RuntimeMatrix::Add(runtime::ThreadPool& pool, int first, const QuantizedMatrix& matrix,
                          std::span<const StoredTensor> tensors, std::span<std::byte* const> encoded) {
  const tensor::PackedLayout& layout = owned_.matrix.layout;
  std::byte* out = owned_.memory.data();
  const TensorEntry weight = EntryOf(tensors[0], matrix.n, encoded[0]),
                    scale = EntryOf(tensors[1], matrix.n, encoded[1]);
  const LinearSource source{.module = "",
                            .scheme = SchemeOf(matrix.grid.kind),
                            .out = matrix.n,
                            .in = matrix.k,
                            .bits = matrix.grid.kind == GridKind::kInt8Group ? 8 : 4,
                            .weight = &weight,
                            .scale = &scale,
                            .block_rows = matrix.grid.group_outputs(),
                            .block_cols = matrix.grid.group_inputs(matrix.k),
                            .global_scale = matrix.global_scale};
  return ForBands(pool, matrix.n, [&](int row, int count) -> Status {
    switch (layout.format) {
      case PackedFormat::kI8:
        tensor::PackRowsI8(layout, first + row, count,
                           reinterpret_cast<const int8_t*>(matrix.codes.data()) + int64_t{row} * matrix.k,
                           matrix.scales.data() + row, out);
        return OkStatus();
      case PackedFormat::kF8G128: {
        tensor::Fp8Rows rows;
        RETURN_IF_ERROR(checkpoint::ReadFp8Rows(source, row, count, rows));
        tensor::PackFp8Rows(layout, first + row, rows, out);
        return OkStatus();
      }
      case PackedFormat::kBF16: {
        std::vector<float> rows(static_cast<size_t>(count) * matrix.k);
        Dequantize(matrix, row, count, rows.data());
        tensor::PackRows(layout, first + row, count, rows.data(), out);
        return OkStatus();
      }
      default: {
        tensor::GroupRows rows;
        RETURN_IF_ERROR(checkpoint::ReadGroupRows(source, row, count, rows));
        tensor::PackGroupRows(layout, first + row, rows, out);
        return OkStatus();
      }
    }
  });
}

void RuntimeMatrix::AddKept(runtime::ThreadPool& pool, int first, int count, const float* rows) {
  const tensor::PackedLayout& layout = owned_.matrix.layout;
  pool.Run(base::CeilDiv(count, kBand), [&](int64_t band, int) {
    const int row = static_cast<int>(band) * kBand;
    tensor::PackRows(layout, first + row, std::min(kBand, count - row), rows + int64_t{row} * layout.k,
                     owned_.memory.data());
  });
}

Status RuntimeMatrix::ReadKept(runtime::ThreadPool& pool, const checkpoint::Checkpoint& source,
                               const std::string& module) {
  const int n = owned_.matrix.n(), k = owned_.matrix.k();
  ASSIGN_OR_RETURN(const LinearSource linear, source.FindLinear(module, n, k));
  return ForBands(pool, n, [&](int row, int count) -> Status {
    std::vector<float> rows(static_cast<size_t>(count) * k);
    RETURN_IF_ERROR(source.ReadLinearRows(linear, row, count, rows));
    for (int64_t i = 0; i < std::ssize(rows); ++i) {
      if (std::fabs(rows[i]) < kTooLarge) continue;
      return DataLoss(
          "{}: {}: the weight of output {}, input {} must be a finite number below 2^96, found {}",
          source.path(), module, row + i / k, i % k, rows[i]);
    }
    tensor::PackRows(owned_.matrix.layout, row, count, rows.data(), owned_.memory.data());
    return OkStatus();
  });
}

}  // namespace moesaic::quantizer
