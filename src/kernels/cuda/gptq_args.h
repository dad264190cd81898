// Arguments of the kernels in gptq.cu, for the program and, without any other header, for NVRTC. [a][b] tells
// what stands where, rows one after another.
#pragma once

namespace moesaic::kernels::cuda {

/// Columns of a block on a factor's diagonal, and rows that a block of threads rounds.
constexpr int kBlockColumns = 128;
constexpr int kBlockRows = 64;
/// Of all kernels but those of rounding, which have kBlockRows.
constexpr int kThreads = 256;

/// One thread an element of `matrix`: H in order from behind, damped and padded with a unit diagonal, so that
/// its Cholesky factor is R from behind (quantizer/factor.h).
struct OrderMatrixArgs {
  const float* sums;  // [k_padded][k_padded], of which j <= i < k is read
  const int* order;   // [k]
  float* matrix;      // out [k_padded][k_padded]
  int k, k_padded;
  float scale, added;
};

/// One thread an element of `panels`.
struct TurnFactorArgs {
  const float* matrix;     // as Device::Cholesky leaves it
  unsigned short* panels;  // out bf16 [k_padded][k_padded]: [c][i] is R[i][c], 0 where i > c
  float* diagonal_blocks;  // out [k_padded / 128][128][128]: the same of i and c in one block
  float* diagonal;         // out [k_padded]: R[c][c]
  int k_padded;
};

/// One thread an input.
struct CopyDiagonalArgs {
  const float* sums;  // [k_padded][k_padded]
  float* diagonal;    // out [k]
  int k, k_padded;
};

/// One thread an element of `values`.
struct GatherWeightsArgs {
  const float* weights;  // [rows][k]
  const int* order;      // [k]
  float* values;         // out [k][rows_padded]: in order, each with its rows side by side; 0 for none
  int rows, rows_padded, k;
};

/// One thread a row: columns [begin, begin + columns) in order, each with what the errors before it ask for
/// (kernels/rounding.h's RoundBlock, and to the bit its results).
struct RoundBlockArgs {
  const float* values;     // [k][rows_padded]
  const float* asked;      // [kBlockColumns][rows_padded]: what errors before `begin` ask for
  const float* scales;     // [groups][rows_padded], not 0
  const int* order;        // [k]
  const float* factor;     // [kBlockColumns][kBlockColumns]: row c holds R[begin + i][begin + c], i <= c
  unsigned short* errors;  // out bf16 [k_padded][rows_padded]
  unsigned char* codes;    // out [rows][k], by input
  float* losses;           // [rows_padded] += each row's part of the loss
  int begin, columns, rows, rows_padded, k;
  int group;  // inputs that share a scale
};

}  // namespace moesaic::kernels::cuda
