#include "kernels/cpu/key_summary.h"
#include "kernels/cpu/simd_avx2-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/estimate-inl.h"
#include "kernels/cpu/key_summary-inl.h"

namespace moesaic::kernels::cpu {

void KeySummaryAvx2(const KeySummaryTask& task) { RunKeySummary(task); }
void KeySummaryEstimatesAvx2(const KeySummaryEstimates& estimates) { RunKeySummaryEstimates(estimates); }
void BlockSharesAvx2(float* scores, int rows, int blocks, float* shares) {
  RunBlockShares(scores, rows, blocks, shares);
}

}  // namespace moesaic::kernels::cpu
