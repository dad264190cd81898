// The attention micro-kernel of each instruction set; what it computes is said in micro_kernels.h.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void AttentionAvx2(const AttentionTile& tile);
void AttentionAvx512(const AttentionTile& tile);
void AttentionAmx(const AttentionTile& tile);  // bfloat16 and dimensions of whole tiles; else as above

}  // namespace moesaic::kernels::cpu
