// Ordered lists of the implementations of every operator's micro-kernel, best first and ref last.
//
// To add a kernel:
// - Declare it in cpu/<op>.h.
// - Define it in cpu/<op>_<isa>.cc; the suffix selects its compile flags (see CMakeLists.txt).
// - Name it in its operator's list in <op>_list.cc.
//
// A file with an ISA suffix must not emit symbols that other files may share: no STL, and no templates or
// inline functions with external linkage. Put helpers in an anonymous namespace. Otherwise the linker could
// pick its copy for code that runs on every processor. The test kernels_isa_symbols checks this.
#pragma once

#include <span>

#include "kernels/kernel_table.h"
#include "runtime/cpu_features.h"

namespace moesaic::kernels {

/// One implementation: its name, following the grammar <op>_<weight>_<activation>_<isa>, and its required
/// instruction set.
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
ImplList<RescaleRowFn> RescaleImpls();              // used by tiled attention
ImplList<RouteFn> RouteImpls();                     // route_list.cc
ImplList<Rounding> RoundingImpls(NumberGrid grid);  // rounding_list.cc
/// Implementations for keys and values of one type (kF32, kBF16 or kI8). One function handles all types.
ImplList<AttentionTileFn> AttentionImpls(tensor::DType kv_dtype);  // attention_list.cc
ImplList<KeySummaryFn> KeySummaryImpls();                          // key_summary_list.cc
ImplList<KeySummaryEstimatesFn> KeySummaryEstimatesImpls();
ImplList<BlockSharesFn> BlockSharesImpls();
ImplList<SketchScoresFn> SketchScoresImpls();

}  // namespace moesaic::kernels
