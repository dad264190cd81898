#include "layers/embedding.h"

#include <algorithm>

namespace moesaic::layers {

void Embed(const kernels::ExecContext& ctx, const tensor::PackedMatrix& table,
           std::span<const int32_t> tokens, float* x, int first_token) {
  ctx.pool->Run(static_cast<int64_t>(tokens.size()), [&](int64_t row, int) {
    const auto width = static_cast<size_t>(table.k());
    const std::span<float> to(x + row * static_cast<int64_t>(width), width);
    const int32_t local = tokens[row] - first_token;
    if (local < 0 || local >= table.n()) {
      std::fill(to.begin(), to.end(), 0.0F);
    } else {
      tensor::UnpackRow(table, local, to);
    }
  });
}

}  // namespace moesaic::layers
