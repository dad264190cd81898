// Attention micro-kernels of each instruction set; micro_kernels.h documents them.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void AttentionAvx2(const AttentionTile& tile);
void AttentionAvx512(const AttentionTile& tile);
// bfloat16 and dimensions of whole tiles; falls back to AVX-512 otherwise
void AttentionAmx(const AttentionTile& tile);

}  // namespace moesaic::kernels::cpu
