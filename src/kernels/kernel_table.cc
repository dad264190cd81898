#include "kernels/kernel_table.h"

#include "base/check.h"
#include "kernels/impl_list.h"

namespace moesaic::kernels {
namespace {

template <typename Fn>
Fn Choose(const char* op, ImplList<Fn> impls, const runtime::CpuFeatures& cpu,
          std::vector<KernelChoice>* choices) {
  KernelChoice choice{.op = op, .name = {}, .isa = runtime::Isa::kRef, .passed_over = {}};
  for (const Impl<Fn>& impl : impls) {
    if (cpu.Prefers(impl.needs)) {
      choice.name = impl.name;
      choice.isa = impl.needs;
      choices->push_back(std::move(choice));
      return impl.fn;
    }
    choice.passed_over.push_back(impl.name);
  }
  base::CheckFailed(__FILE__, __LINE__, "every list ends with ref", op);
}

}  // namespace

KernelTable SelectKernels(const runtime::CpuFeatures& cpu) {
  KernelTable table;
  auto choose = [&](const char* op, auto impls) { return Choose(op, impls, cpu, &table.choices); };
  static constexpr const char* kGemmOps[tensor::kPackedFormats] = {
      "gemm_f32",   "gemm_bf16",  "gemm_i8",    "gemm_f8g128", "gemm_i8g32",
      "gemm_i4g32", "gemm_mxfp4", "gemm_nvfp4", "gemm_q4k",    "gemm_q6k"};
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    table.gemm[f] = choose(kGemmOps[f], GemmImpls(static_cast<tensor::PackedFormat>(f)));
  }
  table.rms_norm = choose("rms_norm", RmsNormImpls());
  table.silu_mul = choose("silu_mul", SiluMulImpls());
  table.axpy = choose("axpy", AxpyImpls());
  table.axpby = choose("axpby", AxpbyImpls());
  table.rope_half = choose("rope_half", RopeHalfImpls());
  table.rope_interleaved = choose("rope_interleaved", RopeInterleavedImpls());
  table.route = choose("route", RouteImpls());
  // The first kernel of bf16's list accepts all types of keys and values; each type reports the kernel that
  // it runs.
  table.attention = choose("attention_kv_bf16", AttentionImpls(tensor::DType::kBF16));
  choose("attention_kv_i8", AttentionImpls(tensor::DType::kI8));
  choose("attention_kv_f32", AttentionImpls(tensor::DType::kF32));
  static constexpr const char* kRoundOps[kNumberGrids] = {"round_int8", "round_int4", "round_e2m1",
                                                          "round_e4m3"};
  for (int g = 0; g < kNumberGrids; ++g) {
    table.rounding[g] = choose(kRoundOps[g], RoundingImpls(static_cast<NumberGrid>(g)));
  }
  table.key_summary = choose("key_summary", KeySummaryImpls());
  table.key_summary_estimates = choose("key_summary_estimates", KeySummaryEstimatesImpls());
  table.block_shares = choose("block_shares", BlockSharesImpls());
  table.sketch_scores = choose("sketch_scores", SketchScoresImpls());
  return table;
}

}  // namespace moesaic::kernels
