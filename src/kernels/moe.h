// The operator of a mixture-of-experts layer.
#pragma once

#include <cstdint>

#include "kernels/column_parts.h"
#include "kernels/exec_context.h"
#include "tensor/packed.h"
#include "tensor/static_scale.h"

namespace moesaic::kernels {

/// All experts of a MoE layer: gate, up [intermediate, hidden] and down [hidden, intermediate] of expert e
/// are stored e * stride bytes after those of expert 0. All experts have the same formats.
struct ExpertWeights {
  tensor::PackedMatrix gate, up, down;  // matrices of expert 0
  int64_t stride = 0;                   // bytes from one expert to the next
  int count = 0;
  // [count * 2]: activation scales of gate/up and of down, or null
  const tensor::StaticScale* input_scales = nullptr;

  tensor::PackedMatrix Of(const tensor::PackedMatrix& first, int expert) const {
    tensor::PackedMatrix matrix = first;
    matrix.data += expert * stride;
    return matrix;
  }
};

/// out[t] = sum over j of weights[t, j] * FFN_{ids[t, j]}(x[t]) (+ FFN_shared(x[t])). Runs as one job: every
/// (expert, row tile, panel group) of the layer, including the shared expert's, goes into one work queue;
/// with several parts, the products with `down` are one job for each part.
struct MoeParams {
  const float* x;  // [rows, hidden]
  int64_t x_stride;
  int rows, hidden, intermediate;
  ExpertWeights experts;
  const int32_t* ids;    // [rows, top_k]; -1 skips the slot (an expert on another rank)
  const float* weights;  // [rows, top_k]
  int top_k;
  // Matrices of a shared expert with its own width, or empty.
  tensor::PackedMatrix shared_gate, shared_up, shared_down;
  int shared_intermediate = 0;
  float* out;  // [rows, out_stride], overwritten
  int64_t out_stride;
  ColumnParts parts = {};  // of `out`
};
void Moe(const ExecContext& ctx, const MoeParams& params);

}  // namespace moesaic::kernels
