// Rows of a linear's weight, read by all threads, and brought to the form in which they run once rounded.
#pragma once

#include <string>
#include <vector>

#include "kernels/ops.h"
#include "quantizer/format/runtime_matrix.h"

namespace moesaic::quantizer {

/// Rows [first, first + count) of `module` [n, k] as f32; the source's pages are given back.
StatusOr<std::vector<float>> ReadRows(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                      const std::string& module, int n, int k, int first, int count);

/// Rounds rows [first, first + count) of an [n, k] weight to the nearest and adds them to `matrix`, as
/// loading them would make them. `first` is a multiple of 128.
Status AddRounded(const kernels::ExecContext& ctx, const Precision& precision, int n, int k, int first,
                  int count, const float* rows, const ScaleSearch& search, RuntimeMatrix* matrix);

}  // namespace moesaic::quantizer
