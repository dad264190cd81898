#include "layers/embedding.h"

namespace moesaic::layers {

void Embed(const kernels::ExecContext& ctx, const tensor::PackedMatrix& table,
           std::span<const int32_t> tokens, float* x) {
  ctx.pool->Run(static_cast<int64_t>(tokens.size()), [&](int64_t row, int) {
    const auto width = static_cast<size_t>(table.k());
    tensor::UnpackRow(table, tokens[row], {x + row * static_cast<int64_t>(width), width});
  });
}

}  // namespace moesaic::layers
