// Reads rows of a linear's weight on all threads and brings them to their run-time form after rounding.
#pragma once

#include <string>
#include <vector>

#include "kernels/exec_context.h"
#include "quantizer/format/runtime_matrix.h"

namespace moesaic::quantizer {

/// Reads rows [first, first + count) of `module` [n, k] as f32 and releases the source's pages.
StatusOr<std::vector<float>> ReadRows(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                      const std::string& module, int n, int k, int first, int count);

/// Rounds rows [first, first + count) of an [n, k] weight to the nearest and adds them to `matrix` in the
/// form that the loader gives them. `first` must be a multiple of 128.
Status AddRounded(const kernels::ExecContext& ctx, const Precision& precision, int n, int k, int first,
                  int count, const float* rows, const ScaleSearch& search, RuntimeMatrix* matrix);

}  // namespace moesaic::quantizer
