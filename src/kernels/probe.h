// Measures how many operations a second the processor's dot products reach, to hold kernels' speed against.
#pragma once

#include <string>
#include <vector>

#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// The best of one format. Operations: two for a multiplication and its addition.
struct DotPeak {
  tensor::PackedFormat format;
  std::string instruction;  // "tdpbusd"
  double one_thread = 0;    // operations a second, the calling thread alone
  double all_threads = 0;   // of all workers together
};

/// Runs what the processor has for each format for some milliseconds each, best of several tries (others on
/// the machine only ever make it slower). Formats without a vector instruction on `cpu` are left out.
std::vector<DotPeak> MeasureDotPeaks(const runtime::CpuFeatures& cpu, runtime::ThreadPool* pool);

}  // namespace moesaic::kernels
