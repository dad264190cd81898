// Kernel parameters that may be tuned by measurement. They affect speed but no bit of a result:
// - the row count from which a product runs on tiles, for each weight format whose vector kernel gives the
//   same bits (KernelTable::Gemm);
// - the task sizes of products (TileSizes).
#pragma once

#include <optional>

#include "base/status.h"
#include "kernels/kernel_table.h"

namespace moesaic::kernels {

/// Must be increased when kernel changes invalidate earlier measurements.
inline constexpr int kTuningVersion = 1;

struct Tuning {
  TileSizes tile_sizes;
  /// Gemm::few_below of each format; nullopt: the default.
  std::optional<int> few_below[tensor::kPackedFormats];

  bool operator==(const Tuning&) const = default;
};

/// Returns InvalidArgument if a size is out of range.
Status CheckSizes(const TileSizes& sizes);

/// Applies the parameters to `table`. Returns InvalidArgument and changes nothing if one is out of range, or
/// belongs to a format without a choice in this table.
Status ApplyTuning(const Tuning& tuning, KernelTable& table);

}  // namespace moesaic::kernels
