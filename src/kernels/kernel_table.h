// The micro-kernels of one machine: for each operator an ordered list of implementations (impl_list.h), of
// which the first that the processor can run is taken. The choice is made once, here, and
// `KernelTable::choices` says what it was.
#pragma once

#include <string>
#include <vector>

#include "kernels/micro_kernels.h"
#include "kernels/rounding.h"
#include "runtime/cpu_features.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// Which implementation an operator got, for `doctor`, the start-up log and /metrics.
struct KernelChoice {
  std::string op;                         // "gemm_i8"
  std::string name;                       // "gemm_i8_i8_avx512vnni"
  runtime::Isa isa = runtime::Isa::kRef;  // that it needs
  std::vector<std::string> passed_over;   // others' better ones: lacking here, or slower
};

/// Sizes of a product's tasks (CutGemm). No result depends on them.
struct CutSizes {
  // A task streams its rows past its panels, which should stay in the L2 cache (1 MiB or more on all
  // processors with AVX-512, 2 MiB where there are tiles) and leave room for the rows.
  int64_t panel_bytes = 512 << 10;  // at most
  int64_t row_bytes = 512 << 10;    // at most
  // So that the last one to finish is late by a quarter of its share at most.
  int tasks_per_thread = 4;

  bool operator==(const CutSizes&) const = default;
};

struct KernelTable {
  struct Gemm {
    GemmTileFn tile = nullptr;
    PrepareRowFn prepare = nullptr;
    int unit_bytes = 0;  // of 64 prepared activations, with what they bring along
    // Products of fewer than few_below rows go to `few`, whose bits are the same, if there is one.
    GemmTileFn few = nullptr;
    int few_below = 0;

    void Run(const GemmTile& t) const { (t.m < few_below ? few : tile)(t); }
  };
  Gemm gemm[tensor::kPackedFormats];
  CutSizes cut;
  RmsNormRowFn rms_norm = nullptr;
  SiluMulRowFn silu_mul = nullptr;
  AxpyRowFn axpy = nullptr;
  AxpbyRowFn axpby = nullptr;
  RopeRowFn rope_half = nullptr;
  RopeRowFn rope_interleaved = nullptr;
  RouteFn route = nullptr;
  AttentionTileFn attention = nullptr;
  Rounding rounding[kNumberGrids];
  DigestFn digest = nullptr;
  DigestScoresFn digest_scores = nullptr;
  DigestEstimatesFn digest_estimates = nullptr;
  BlockSharesFn block_shares = nullptr;
  SketchScoresFn sketch_scores = nullptr;
  ExpSumFn exp_sum = nullptr;
  std::vector<KernelChoice> choices;
};

/// Chooses the first fitting implementation of every operator; ref/ always fits, so this never fails.
KernelTable SelectKernels(const runtime::CpuFeatures& cpu);

}  // namespace moesaic::kernels
