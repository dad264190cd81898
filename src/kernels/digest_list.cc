#include "kernels/cpu/digest.h"
#include "kernels/impl_list.h"
#include "kernels/ref/digest.h"

namespace moesaic::kernels {

ImplList<DigestFn> DigestImpls() {
  static constexpr Impl<DigestFn> kImpls[] = {
      {"digest_avx512", runtime::Isa::kAvx512, cpu::DigestAvx512},
      {"digest_avx2", runtime::Isa::kAvx2, cpu::DigestAvx2},
      {"digest_ref", runtime::Isa::kRef, ref::Digest},
  };
  return kImpls;
}

ImplList<DigestScoresFn> DigestScoresImpls() {
  static constexpr Impl<DigestScoresFn> kImpls[] = {
      {"digest_scores_i8_bf16x2_amx", runtime::Isa::kAmx, cpu::DigestScoresAmx},
      {"digest_scores_i8_f32_avx512", runtime::Isa::kAvx512, cpu::DigestScoresAvx512},
      {"digest_scores_i8_f32_avx2", runtime::Isa::kAvx2, cpu::DigestScoresAvx2},
      {"digest_scores_i8_f32_ref", runtime::Isa::kRef, ref::DigestScores},
  };
  return kImpls;
}

ImplList<DigestEstimatesFn> DigestEstimatesImpls() {
  static constexpr Impl<DigestEstimatesFn> kImpls[] = {
      {"digest_estimates_i8_i8x2_amx", runtime::Isa::kAmx, cpu::DigestEstimatesAmx},
      {"digest_estimates_i8_i8x2_avx512vnni", runtime::Isa::kAvx512Vnni, cpu::DigestEstimatesAvx512Vnni},
      {"digest_estimates_i8_f32_avx512", runtime::Isa::kAvx512, cpu::DigestEstimatesAvx512},
      {"digest_estimates_i8_f32_avx2", runtime::Isa::kAvx2, cpu::DigestEstimatesAvx2},
      {"digest_estimates_i8_f32_ref", runtime::Isa::kRef, ref::DigestEstimates},
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

ImplList<ExpSumFn> ExpSumImpls() {
  static constexpr Impl<ExpSumFn> kImpls[] = {
      {"exp_sum_avx512", runtime::Isa::kAvx512, cpu::ExpSumAvx512},
      {"exp_sum_avx2", runtime::Isa::kAvx2, cpu::ExpSumAvx2},
      {"exp_sum_ref", runtime::Isa::kRef, ref::ExpSum},
  };
  return kImpls;
}

}  // namespace moesaic::kernels
