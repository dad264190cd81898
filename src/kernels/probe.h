// Measures the processor's peak rate of dot products, the reference for the speed of kernels.
#pragma once

#include <string>
#include <vector>

#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// Peak of one format. A multiplication and its addition count as two operations.
struct DotPeak {
  tensor::PackedFormat format;
  std::string instruction;  // "tdpbusd"
  double one_thread = 0;    // operations per second, the calling thread alone
  double all_threads = 0;   // operations per second, all workers together
};

/// Runs the best dot-product instruction of each format for some milliseconds, and returns the best of
/// several tries, because other processes only ever slow it down. Formats without a vector instruction on
/// `cpu` are omitted.
std::vector<DotPeak> MeasureDotPeaks(const runtime::CpuFeatures& cpu, runtime::ThreadPool* pool);

}  // namespace moesaic::kernels
