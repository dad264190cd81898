// Arguments of the kernels in gptq.cu, included by the program and, without any other header, by NVRTC.
// Shapes [a][b] are row-major.
#pragma once

namespace moesaic::kernels::cuda {

/// Columns of a block on a factor's diagonal, and rows that one thread block rounds.
constexpr int kBlockColumns = 128;
constexpr int kBlockRows = 64;
/// Threads per block of all kernels but the rounding ones, which have kBlockRows.
constexpr int kThreads = 256;

/// One thread per element of `matrix`: H in quantization order, reversed, damped and padded with a unit
/// diagonal, so that its Cholesky factor is R reversed (quantizer/gptq/factor.h).
struct OrderMatrixArgs {
  const float* sums;  // [k_padded][k_padded], of which elements j <= i < k are read
  const int* order;   // [k]
  float* matrix;      // out [k_padded][k_padded]
  int k, k_padded;
  float scale, added;
};

/// One thread per element of `panels`.
struct ReverseFactorArgs {
  const float* matrix;     // as written by GptqAccelerator::Cholesky
  unsigned short* panels;  // out bf16 [k_padded][k_padded]: [c][i] is R[i][c], 0 where i > c
  float* diagonal_blocks;  // out [k_padded / 128][128][128]: the same elements where i and c are in one block
  float* diagonal;         // out [k_padded]: R[c][c]
  int k_padded;
};

/// One thread per input.
struct CopyDiagonalArgs {
  const float* sums;  // [k_padded][k_padded]
  float* diagonal;    // out [k]
  int k, k_padded;
};

/// One thread per element of `values`.
struct GatherWeightsArgs {
  const float* weights;  // [rows][k]
  const int* order;      // [k]
  // out [k][rows_padded]: inputs in quantization order, the rows of one input contiguous; 0 in padding
  float* values;
  int rows, rows_padded, k;
};

/// One thread per row: rounds columns [begin, begin + columns) in order, each after adding the correction
/// from earlier errors. The bits equal those of RoundBlock in kernels/rounding.h.
struct RoundBlockArgs {
  const float* values;  // [k][rows_padded]
  const float*
      corrections;         // [kBlockColumns][rows_padded]: corrections from errors of columns before `begin`
  const float* scales;     // [groups][rows_padded], not 0
  const int* order;        // [k]
  const float* factor;     // [kBlockColumns][kBlockColumns]: row c holds R[begin + i][begin + c], i <= c
  unsigned short* errors;  // out bf16 [k_padded][rows_padded]
  unsigned char* codes;    // out [rows][k], indexed by input
  float* losses;           // [rows_padded] incremented by each row's share of the loss
  int begin, columns, rows, rows_padded, k;
  int group;  // inputs that share a scale
};

}  // namespace moesaic::kernels::cuda
