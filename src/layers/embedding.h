// Token embedding: rows of a packed table.
#pragma once

#include <span>

#include "layers/step.h"
#include "tensor/packed.h"

namespace moesaic::layers {

/// x [tokens.size(), table.k()] = rows `tokens` of `table` [vocab, hidden]; every token is in [0, vocab).
void Embed(const kernels::ExecContext& ctx, const tensor::PackedMatrix& table,
           std::span<const int32_t> tokens, float* x);

}  // namespace moesaic::layers
