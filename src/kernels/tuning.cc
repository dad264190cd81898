#include "kernels/tuning.h"

namespace moesaic::kernels {
namespace {

// Values outside of these limits cannot come from a measurement.
constexpr int64_t kMinBytes = 16 << 10, kMaxBytes = 64 << 20;
constexpr int kMaxTasks = 64;
constexpr int kMaxRows = 1024;

Status CheckRange(const char* what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return OkStatus();
  return InvalidArgument("{} must be in [{}, {}], found {}", what, least, most, value);
}

}  // namespace

Status CheckSizes(const TileSizes& sizes) {
  RETURN_IF_ERROR(CheckRange("panel_bytes", sizes.panel_bytes, kMinBytes, kMaxBytes));
  RETURN_IF_ERROR(CheckRange("row_bytes", sizes.row_bytes, kMinBytes, kMaxBytes));
  return CheckRange("tasks_per_thread", sizes.tasks_per_thread, 1, kMaxTasks);
}

Status ApplyTuning(const Tuning& tuning, KernelTable& table) {
  RETURN_IF_ERROR(CheckSizes(tuning.tile_sizes));
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    if (!tuning.few_below[f].has_value()) continue;
    const std::string name = tensor::PackedFormatName(static_cast<tensor::PackedFormat>(f));
    RETURN_IF_ERROR(CheckRange((name + " few_below").c_str(), *tuning.few_below[f], 0, kMaxRows));
    if (table.gemm[f].few == nullptr) {
      return InvalidArgument("{} few_below: this processor has only one kernel for the format", name);
    }
  }
  table.tile_sizes = tuning.tile_sizes;
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    if (tuning.few_below[f].has_value()) table.gemm[f].few_below = *tuning.few_below[f];
  }
  return OkStatus();
}

}  // namespace moesaic::kernels
