#include "kernels/cpu/key_summary.h"
#include "kernels/cpu/simd_avx2-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/sketch-inl.h"

namespace moesaic::kernels::cpu {

void SketchScoresAvx2(const SketchScores& scores) { RunSketchScores(scores); }

}  // namespace moesaic::kernels::cpu
