// Reference implementation of the attention micro-kernel: the oracle of its tests, and the fallback on
// processors without the others' instruction sets.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

void Attention(const AttentionTile& tile);

}  // namespace moesaic::kernels::ref
