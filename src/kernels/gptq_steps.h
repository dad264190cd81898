// GPTQ's steps on a device, each carried out by one of its kernels (DeviceKernel). Pointers are to the
// device's memory; [a][b] tells what stands where, rows one after another. K is k padded to whole blocks of
// columns, N rows padded to whole blocks of rows.
#pragma once

#include "kernels/device.h"
#include "kernels/rounding.h"

namespace moesaic::kernels {

/// Columns of a block on a factor's diagonal, and rows that are rounded beside each other.
inline constexpr int kDeviceBlockColumns = 128, kDeviceBlockRows = 64;

/// H in order from behind, damped and padded with a unit diagonal, so that its Cholesky factor is R from
/// behind (quantizer/factor.h).
struct DeviceOrder {
  const float* sums = nullptr;  // [K][K], of which j <= i < k is read
  const int* order = nullptr;   // [k]
  float* matrix = nullptr;      // out [K][K]
  int k = 0, k_padded = 0;
  float scale = 0, added = 0;
};
Status OrderMatrix(Device& device, const DeviceOrder& order);

/// R from a factor that Device::Cholesky left.
struct DeviceTurn {
  const float* matrix = nullptr;
  uint16_t* panels = nullptr;        // out bf16 [K][K]: [c][i] is R[i][c], 0 where i > c
  float* diagonal_blocks = nullptr;  // out [K / 128][128][128]: the same of i and c in one block
  float* diagonal = nullptr;         // out [K]: R[c][c]
  int k_padded = 0;
};
Status TurnFactor(Device& device, const DeviceTurn& turn);

/// `sums` [K][K], `diagonal` out [k].
Status CopyDiagonal(Device& device, const float* sums, int k, int k_padded, float* diagonal);

/// Weights in order, each with its rows side by side.
struct DeviceGather {
  const float* weights = nullptr;  // [rows][k]
  const int* order = nullptr;      // [k]
  float* values = nullptr;         // out [k][N], 0 for rows that are not there
  int rows = 0, rows_padded = 0, k = 0;
};
Status GatherWeights(Device& device, const DeviceGather& gather);

/// Rounds columns [begin, begin + columns) in order, each with what the errors before it ask for: to the bit
/// what kernels/rounding.h's RoundBlock comes to.
struct DeviceRound {
  NumberGrid grid = NumberGrid::kInt8;
  const float* values = nullptr;  // [k][N]
  const float* asked = nullptr;   // [128][N]: what errors before `begin` ask for
  const float* scales = nullptr;  // [groups][N], not 0
  const int* order = nullptr;     // [k]
  const float* factor = nullptr;  // [128][128]: row c holds R[begin + i][begin + c], i <= c
  uint16_t* errors = nullptr;     // out bf16 [K][N]
  uint8_t* codes = nullptr;       // out [rows][k], by input
  float* losses = nullptr;        // [N] += each row's part of the loss
  int begin = 0, columns = 0, rows = 0, rows_padded = 0, k = 0;
  int group = 0;  // inputs that share a scale
};
Status RoundColumns(Device& device, const DeviceRound& round);

}  // namespace moesaic::kernels
