// The attention micro-kernel in plain code: what the others are tested against, and what runs where no other
// can.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

void Attention(const AttentionTile& tile);

}  // namespace moesaic::kernels::ref
