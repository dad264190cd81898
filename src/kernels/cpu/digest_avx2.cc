#include "kernels/cpu/digest.h"
#include "kernels/cpu/simd_avx2-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/digest-inl.h"
#include "kernels/cpu/estimate-inl.h"

namespace moesaic::kernels::cpu {

void DigestAvx2(const DigestTask& task) { RunDigest(task); }
void DigestScoresAvx2(const DigestScores& scores) { RunDigestScores(scores); }
void DigestEstimatesAvx2(const DigestEstimates& estimates) { RunDigestEstimates(estimates); }
void BlockSharesAvx2(float* scores, int rows, int blocks, float* shares) {
  RunBlockShares(scores, rows, blocks, shares);
}
float ExpSumAvx2(const float* x, const float* y, float spread, float shift, int n, float* out) {
  return RunExpSum(x, y, spread, shift, n, out);
}

}  // namespace moesaic::kernels::cpu
