#include "kernels/cpu/key_summary.h"
#include "kernels/impl_list.h"
#include "kernels/ref/key_summary.h"

namespace moesaic::kernels {

ImplList<KeySummaryFn> KeySummaryImpls() {
  static constexpr Impl<KeySummaryFn> kImpls[] = {
      {"key_summary_avx512", runtime::Isa::kAvx512, cpu::KeySummaryAvx512},
      {"key_summary_avx2", runtime::Isa::kAvx2, cpu::KeySummaryAvx2},
      {"key_summary_ref", runtime::Isa::kRef, ref::KeySummary},
  };
  return kImpls;
}

ImplList<KeySummaryEstimatesFn> KeySummaryEstimatesImpls() {
  static constexpr Impl<KeySummaryEstimatesFn> kImpls[] = {
      {"key_summary_estimates_i8_i8x2_amx", runtime::Isa::kAmx, cpu::KeySummaryEstimatesAmx},
      {"key_summary_estimates_i8_i8x2_avx512vnni", runtime::Isa::kAvx512Vnni,
       cpu::KeySummaryEstimatesAvx512Vnni},
      {"key_summary_estimates_i8_f32_avx512", runtime::Isa::kAvx512, cpu::KeySummaryEstimatesAvx512},
      {"key_summary_estimates_i8_f32_avx2", runtime::Isa::kAvx2, cpu::KeySummaryEstimatesAvx2},
      {"key_summary_estimates_i8_f32_ref", runtime::Isa::kRef, ref::KeySummaryEstimates},
  };
  return kImpls;
}

ImplList<BlockSharesFn> BlockSharesImpls() {
  static constexpr Impl<BlockSharesFn> kImpls[] = {
      {"block_shares_avx512", runtime::Isa::kAvx512, cpu::BlockSharesAvx512},
      {"block_shares_avx2", runtime::Isa::kAvx2, cpu::BlockSharesAvx2},
      {"block_shares_ref", runtime::Isa::kRef, ref::BlockShares},
  };
  return kImpls;
}

ImplList<SketchScoresFn> SketchScoresImpls() {
  static constexpr Impl<SketchScoresFn> kImpls[] = {
      {"sketch_scores_i1_i8_amx", runtime::Isa::kAmx, cpu::SketchScoresAmx},
      {"sketch_scores_i1_i8_avx512vnni", runtime::Isa::kAvx512Vnni, cpu::SketchScoresAvx512Vnni},
      {"sketch_scores_i1_i8_avx512", runtime::Isa::kAvx512, cpu::SketchScoresAvx512},
      {"sketch_scores_i1_i8_avx2", runtime::Isa::kAvx2, cpu::SketchScoresAvx2},
      {"sketch_scores_i1_i8_ref", runtime::Isa::kRef, ref::SketchScores},
  };
  return kImpls;
}

}  // namespace moesaic::kernels
