// The steps of GPTQ on an accelerator; each launches one of its kernels (DeviceKernel). Pointers refer to
// device memory; shapes [a][b] are row-major. K is k padded to whole blocks of columns, N is rows padded to
// whole blocks of rows.
#pragma once

#include "kernels/gptq_accelerator.h"
#include "kernels/rounding.h"

namespace moesaic::kernels {

/// Columns of a block on a factor's diagonal, and rows that one thread block rounds.
inline constexpr int kGptqBlockColumns = 128, kGptqBlockRows = 64;

/// H in quantization order, reversed, damped and padded with a unit diagonal, so that its Cholesky factor is
/// R reversed (quantizer/gptq/factor.h).
struct DeviceOrder {
  const float* sums = nullptr;  // [K][K], of which elements j <= i < k are read
  const int* order = nullptr;   // [k]
  float* matrix = nullptr;      // out [K][K]
  int k = 0, k_padded = 0;
  float scale = 0, added = 0;
};
Status OrderMatrix(GptqAccelerator& device, const DeviceOrder& order);

/// R computed from the factor that GptqAccelerator::Cholesky wrote.
struct DeviceReverse {
  const float* matrix = nullptr;
  uint16_t* panels = nullptr;  // out bf16 [K][K]: [c][i] is R[i][c], 0 where i > c
  // out [K / 128][128][128]: the same elements where i and c are in one block
  float* diagonal_blocks = nullptr;
  float* diagonal = nullptr;  // out [K]: R[c][c]
  int k_padded = 0;
};
Status ReverseFactor(GptqAccelerator& device, const DeviceReverse& reverse);

/// Copies the diagonal of `sums` [K][K] to `diagonal` [k].
Status CopyDiagonal(GptqAccelerator& device, const float* sums, int k, int k_padded, float* diagonal);

/// Gathers weights in quantization order, transposed: the rows of one input are contiguous.
struct DeviceGather {
  const float* weights = nullptr;  // [rows][k]
  const int* order = nullptr;      // [k]
  float* values = nullptr;         // out [k][N], 0 in padding rows
  int rows = 0, rows_padded = 0, k = 0;
};
Status GatherWeights(GptqAccelerator& device, const DeviceGather& gather);

/// Rounds columns [begin, begin + columns) in order, each after adding the correction from earlier errors.
/// The bits equal those of RoundBlock in kernels/rounding.h.
struct DeviceRound {
  NumberGrid grid = NumberGrid::kInt8;
  const float* values = nullptr;       // [k][N]
  const float* corrections = nullptr;  // [128][N]: corrections from errors of columns before `begin`
  const float* scales = nullptr;       // [groups][N], not 0
  const int* order = nullptr;          // [k]
  const float* factor = nullptr;       // [128][128]: row c holds R[begin + i][begin + c], i <= c
  uint16_t* errors = nullptr;          // out bf16 [K][N]
  uint8_t* codes = nullptr;            // out [rows][k], indexed by input
  float* losses = nullptr;             // [N] incremented by each row's share of the loss
  int begin = 0, columns = 0, rows = 0, rows_padded = 0, k = 0;
  int group = 0;  // inputs that share a scale
};
Status RoundColumns(GptqAccelerator& device, const DeviceRound& round);

}  // namespace moesaic::kernels
