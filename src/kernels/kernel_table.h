// The selected micro-kernels of one machine: for each operator the first implementation of its ordered list
// (impl_list.h) that the processor can run. The selection happens once, here, and `KernelTable::choices`
// reports it.
#pragma once

#include <string>
#include <vector>

#include "kernels/micro_kernels.h"
#include "kernels/rounding.h"
#include "runtime/cpu_features.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// The implementation selected for an operator, for `doctor`, the start-up log and /metrics.
struct KernelChoice {
  std::string op;                         // "gemm_i8"
  std::string name;                       // "gemm_i8_i8_avx512vnni"
  runtime::Isa isa = runtime::Isa::kRef;  // required instruction set
  // better implementations that need a missing instruction set or are slower on this processor
  std::vector<std::string> passed_over;
};

/// Task sizes of matrix products. They do not affect results.
struct TileSizes {
  // A task streams its rows past its panels. The panels should stay in the L2 cache (1 MiB or more on all
  // processors with AVX-512, 2 MiB on those with AMX) and leave room for the rows.
  int64_t panel_bytes = 512 << 10;  // maximum bytes of panels per task
  int64_t row_bytes = 512 << 10;    // maximum bytes of rows per task
  // Minimum tasks per thread, so that the last worker to finish is late by at most a quarter of its share.
  int tasks_per_thread = 4;

  bool operator==(const TileSizes&) const = default;
};

struct KernelTable {
  struct Gemm {
    GemmTileFn tile = nullptr;
    PrepareRowFn prepare = nullptr;
    int unit_bytes = 0;  // bytes of 64 quantized activations, including their scales
    // Products with fewer than few_below rows run on `few`, if it is set; its results are bit-identical.
    GemmTileFn few = nullptr;
    int few_below = 0;

    void Run(const GemmTile& t) const { (t.m < few_below ? few : tile)(t); }
  };
  Gemm gemm[tensor::kPackedFormats];
  TileSizes tile_sizes;
  RmsNormRowFn rms_norm = nullptr;
  SiluMulRowFn silu_mul = nullptr;
  AxpyRowFn axpy = nullptr;
  AxpbyRowFn axpby = nullptr;
  RopeRowFn rope_half = nullptr;
  RopeRowFn rope_interleaved = nullptr;
  RouteFn route = nullptr;
  AttentionTileFn attention = nullptr;
  Rounding rounding[kNumberGrids];
  KeySummaryFn key_summary = nullptr;
  KeySummaryEstimatesFn key_summary_estimates = nullptr;
  BlockSharesFn block_shares = nullptr;
  SketchScoresFn sketch_scores = nullptr;
  std::vector<KernelChoice> choices;
};

/// Selects the first usable implementation of every operator. It cannot fail, because ref/ is always usable.
KernelTable SelectKernels(const runtime::CpuFeatures& cpu);

}  // namespace moesaic::kernels
