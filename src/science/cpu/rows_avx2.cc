#include "science/cpu/lanes_avx2-inl.h"
#include "science/cpu/transpose-inl.h"
#include "science/row_kernels.h"
// Requires the lanes included above:
#include "science/cpu/matmul-inl.h"
#include "science/cpu/rows-inl.h"

namespace moesaic::graph::cpu {

RowKernels RowKernelsAvx2() {
  return {ActivateRow,         LayerNormRow,        GateRow, SoftmaxOfRow, ExpRow, RunMatmul, TransposeRows,
          ActivateGradientRow, LayerNormGradientRow};
}

}  // namespace moesaic::graph::cpu
