// Results of PyTorch's CPU kernels on f32 that depend on the order of additions or on ties.
#pragma once

#include <span>
#include <vector>

namespace moesaic::parallel {

/// Sum as of torch.sum over the innermost dimension: eight lanes, four accumulators per lane, cascaded in
/// levels of 16 rows and more (aten/src/ATen/native/cpu/SumKernel.cpp).
float TorchSum(std::span<const float> values);

/// Indices as of torch.sort(descending=True), which isn't stable. PyTorch's wheels use std::sort of libstdc++
/// for it, whose order of equal values depends on comparisons only; eplb_test.cc compares it with goldens.
std::vector<int> TorchSortDescending(std::span<const float> values);

}  // namespace moesaic::parallel
