// Attention over chosen blocks that may still have to be fetched.
#pragma once

#include "kernels/block_sparsity.h"
#include "layers/step.h"

namespace moesaic::layers {

/// Runs a whole SparseAttentionPass and fetches blocks before each read.
inline void AttendChosen(const Step& step, const kernels::AttentionParams& params) {
  kernels::SparseAttentionPass pass(step.ctx, params);
  while (pass.ChooseBlocks()) {
    do {
      step.Fetch(params.cache, pass.reads());
    } while (pass.AttendChosen());
  }
}

}  // namespace moesaic::layers
