#include "layers/mlp.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/elementwise.h"

namespace moesaic::layers {

void Mlp::Gated(const Step& step, const float* x, float* gated) const {
  ScratchScope scratch(step.ctx);
  const int rows = step.rows();
  const int width = gate.n();
  auto* lifted = scratch.Take<float>(static_cast<int64_t>(rows) * width);
  const LinearOutput outputs[] = {{&gate, gated, width}, {&up, lifted, width}};
  ApplyGroup(step.ctx, outputs, x, gate.k(), rows);
  kernels::SiluMul(step.ctx, {.gate = gated,
                              .up = lifted,
                              .y = gated,
                              .gate_stride = width,
                              .up_stride = width,
                              .y_stride = width,
                              .rows = rows,
                              .n = width});
}

void Mlp::Forward(const Step& step, const float* x, float* out, bool accumulate,
                  const kernels::ColumnParts& parts) const {
  if (gate.weight.empty()) {
    MOESAIC_CHECK(!accumulate);
    for (int row = 0; row < step.rows(); ++row) {
      float* to = out + static_cast<int64_t>(row) * hidden;
      down.bias != nullptr ? std::copy_n(down.bias, hidden, to) : std::fill_n(to, hidden, 0.0F);
    }
    return parts.DoneAll(hidden);
  }
  ScratchScope scratch(step.ctx);
  auto* gated = scratch.Take<float>(static_cast<int64_t>(step.rows()) * gate.n());
  Gated(step, x, gated);
  Apply(step.ctx, down, gated, gate.n(), step.rows(), out, down.n(), accumulate, parts);
}

}  // namespace moesaic::layers
