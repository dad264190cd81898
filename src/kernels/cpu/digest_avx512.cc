#include "kernels/cpu/digest.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/digest-inl.h"
#include "kernels/cpu/estimate-inl.h"

namespace moesaic::kernels::cpu {

void DigestAvx512(const DigestTask& task) { RunDigest(task); }
void DigestScoresAvx512(const DigestScores& scores) { RunDigestScores(scores); }
void DigestEstimatesAvx512(const DigestEstimates& estimates) { RunDigestEstimates(estimates); }
void BlockSharesAvx512(float* scores, int rows, int blocks, float* shares) {
  RunBlockShares(scores, rows, blocks, shares);
}
float ExpSumAvx512(const float* x, const float* y, float spread, float shift, int n, float* out) {
  return RunExpSum(x, y, spread, shift, n, out);
}

}  // namespace moesaic::kernels::cpu
