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
  std::vector<std::string> passed_over;   // better ones that this processor lacks
};

struct KernelTable {
  struct Gemm {
    GemmTileFn tile = nullptr;
    PrepareRowFn prepare = nullptr;
    int unit_bytes = 0;  // of 64 prepared activations, with what they bring along
  };
  Gemm gemm[tensor::kPackedFormats];
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
  SketchScoresFn sketch_scores = nullptr;
  ExpSumFn exp_sum = nullptr;
  std::vector<KernelChoice> choices;
};

/// Chooses the first fitting implementation of every operator; ref/ always fits, so this never fails.
KernelTable SelectKernels(const runtime::CpuFeatures& cpu);

}  // namespace moesaic::kernels
