#include "kernels/cpu/key_summary.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/estimate-inl.h"
#include "kernels/cpu/key_summary-inl.h"

namespace moesaic::kernels::cpu {

void KeySummaryAvx512(const KeySummaryTask& task) { RunKeySummary(task); }
void KeySummaryEstimatesAvx512(const KeySummaryEstimates& estimates) { RunKeySummaryEstimates(estimates); }
void BlockSharesAvx512(float* scores, int rows, int blocks, float* shares) {
  RunBlockShares(scores, rows, blocks, shares);
}

}  // namespace moesaic::kernels::cpu
