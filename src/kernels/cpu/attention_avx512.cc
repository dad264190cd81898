#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/attention-inl.h"

namespace moesaic::kernels::cpu {

void AttentionAvx512(const AttentionTile& tile) { RunAttentionTile(tile); }

}  // namespace moesaic::kernels::cpu
