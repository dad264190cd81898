// Block-sparse attention over blocks that may not be in memory.
#pragma once

#include "kernels/block_sparsity.h"
#include "layers/step.h"

namespace moesaic::layers {

/// Runs a whole SparseAttentionPass and fetches blocks before each read.
inline void AttendChosen(const Step& step, const kernels::AttentionParams& params) {
  kernels::SparseAttentionPass pass(step.ctx, params);
  while (pass.ChooseBlocks()) {
    step.Fetch(params.cache, pass.reads());
    pass.AttendChosen();
  }
}

}  // namespace moesaic::layers
