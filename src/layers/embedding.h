// Token embedding: rows of a packed table.
#pragma once

#include <span>

#include "layers/step.h"
#include "tensor/packed.h"

namespace moesaic::layers {

/// x [tokens.size(), table.k()] = rows `tokens` of `table` [vocab, hidden]. The table begins with token
/// `first_token`; rows of tokens outside of it are 0, as another rank has them.
void Embed(const kernels::ExecContext& ctx, const tensor::PackedMatrix& table,
           std::span<const int32_t> tokens, float* x, int first_token = 0);

}  // namespace moesaic::layers
