// The ordered implementations of every operator's micro-kernel, best first and ref last.
//
// To add a kernel: declare it in cpu/<op>.h, define it in cpu/<op>_<isa>.cc (the suffix decides its compile
// flags, see CMakeLists.txt), and name it in the list of its operator's <op>_list.cc. A file with an ISA
// suffix must emit no symbol that other files may share (no STL, no templates or inline functions with
// external linkage: put its helpers in an anonymous namespace), or the linker could pick its copy for code
// that runs on every processor; the test kernels_isa_symbols checks that.
#pragma once

#include <span>

#include "kernels/kernel_table.h"
#include "runtime/cpu_features.h"

namespace moesaic::kernels {

/// One implementation: its name after the grammar <op>_<weight>_<activation>_<isa>, and what it needs to run.
template <typename Fn>
struct Impl {
  const char* name;
  runtime::Isa needs;
  Fn fn;
};

template <typename Fn>
using ImplList = std::span<const Impl<Fn>>;

ImplList<KernelTable::Gemm> GemmImpls(tensor::PackedFormat format);  // gemm_list.cc
ImplList<RmsNormRowFn> RmsNormImpls();                               // elementwise_list.cc
ImplList<SiluMulRowFn> SiluMulImpls();
ImplList<AxpyRowFn> AxpyImpls();
ImplList<AxpbyRowFn> AxpbyImpls();
ImplList<RopeRowFn> RopeHalfImpls();
ImplList<RopeRowFn> RopeInterleavedImpls();
ImplList<RescaleRowFn> RescaleImpls();              // what attention on tiles calls itself
ImplList<RouteFn> RouteImpls();                     // route_list.cc
ImplList<Rounding> RoundingImpls(NumberGrid grid);  // rounding_list.cc
/// Those that run on keys and values of a type (kF32, kBF16 or kI8); one function takes all types.
ImplList<AttentionTileFn> AttentionImpls(tensor::DType kv_dtype);  // attention_list.cc
ImplList<DigestFn> DigestImpls();                                  // digest_list.cc
ImplList<DigestScoresFn> DigestScoresImpls();
ImplList<DigestEstimatesFn> DigestEstimatesImpls();
ImplList<BlockSharesFn> BlockSharesImpls();
ImplList<SketchScoresFn> SketchScoresImpls();
ImplList<ExpSumFn> ExpSumImpls();

}  // namespace moesaic::kernels
