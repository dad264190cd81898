// What of the kernels may be chosen by measuring: it changes speed and no bit of a result. From how many rows
// on a product runs on tiles, of each weight format whose vector kernel gives the same bits
// (KernelTable::Gemm), and how products are cut into tasks (CutSizes).
#pragma once

#include <optional>

#include "base/status.h"
#include "kernels/kernel_table.h"

namespace moesaic::kernels {

/// Raised when kernels change so that what was measured before says nothing any more.
inline constexpr int kTuningVersion = 1;

struct Tuning {
  CutSizes cut;
  /// Gemm::few_below of each format; none: as it is built in.
  std::optional<int> few_below[tensor::kPackedFormats];

  bool operator==(const Tuning&) const = default;
};

/// InvalidArgument when a size is beyond reason.
Status CheckSizes(const CutSizes& cut);

/// Puts the choices into `table`. InvalidArgument, and nothing done, when one is beyond reason, or of a
/// format that has no choice in this table.
Status ApplyTuning(const Tuning& tuning, KernelTable& table);

}  // namespace moesaic::kernels
