#include "tensor/fp8_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "tensor/dtype.h"

namespace moesaic::tensor {
namespace {

constexpr float kLargestFp8 = 448;

// Returns the offset of the unit that holds input `i` of `row`, from the start of the matrix.
int64_t UnitOffset(const PackedLayout& layout, int row, int i) {
  return row / kPanelRows * layout.panel_bytes + i / kFp8Inputs * kFp8UnitBytes;
}

int CodeOffset(int row, int i) {
  const int r = row % kPanelRows, in_unit = i % kFp8Inputs;
  return kFp8ScaleBytes + 64 * (in_unit / 4) + 16 * (r / 4) + 8 * (in_unit % 4 / 2) + 2 * (r % 4) +
         in_unit % 2;
}

}  // namespace

void Fp8Rows::Resize(int new_rows, int new_k) {
  rows = new_rows;
  k = new_k;
  codes.resize(size_t(rows) * k);
  scales.resize(size_t(rows) * groups());
}

Fp8Rows Fp8Rows::Columns(int first, int count) const {
  MOESAIC_CHECK_EQ(first % kFp8Inputs, 0);
  Fp8Rows part;
  part.Resize(rows, count);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(codes.begin() + r * k + first, count, part.codes.begin() + r * count);
    std::copy_n(scales.begin() + r * groups() + first / kFp8Inputs, part.groups(),
                part.scales.begin() + r * part.groups());
  }
  return part;
}

Fp8Rows QuantizeFp8(int rows, int k, const float* values) {
  Fp8Rows result;
  result.Resize(rows, k);
  for (int r = 0; r < rows; ++r) {
    for (int g = 0; g < result.groups(); ++g) {
      const int first = g * kFp8Inputs, end = std::min(first + kFp8Inputs, k);
      const float* row = values + int64_t{r} * k;
      float amax = 0;
      for (int i = first; i < end; ++i) amax = std::max(amax, std::fabs(row[i]));
      const float scale = amax / kLargestFp8;
      result.scales[int64_t{r} * result.groups() + g] = scale;
      uint8_t* codes = &result.codes[int64_t{r} * k];
      for (int i = first; i < end; ++i) codes[i] = scale > 0 ? FloatToF8E4M3(row[i] / scale) : 0;
    }
  }
  return result;
}

void PackFp8Rows(const PackedLayout& layout, int first_row, const Fp8Rows& rows, std::byte* out) {
  MOESAIC_CHECK_EQ(first_row % kPanelRows, 0);
  MOESAIC_CHECK_LE(first_row + rows.rows, layout.n);
  MOESAIC_CHECK_EQ(rows.k, layout.k);
  for (int r = 0; r < rows.rows; ++r) {
    const int row = first_row + r;
    for (int i = 0; i < rows.k; ++i) {
      std::byte* unit = out + UnitOffset(layout, row, i);
      unit[CodeOffset(row, i)] = static_cast<std::byte>(rows.codes[int64_t{r} * rows.k + i]);
      if (i % kFp8Inputs != 0) continue;
      const float scale = rows.scales[int64_t{r} * rows.groups() + i / kFp8Inputs];
      std::memcpy(unit + sizeof(float) * (row % kPanelRows), &scale, sizeof scale);
    }
  }
}

void UnpackFp8Row(const PackedMatrix& matrix, int row, std::span<float> out) {
  const int at = matrix.first_row + row;
  for (int i = 0; i < matrix.k(); ++i) {
    const std::byte* unit = matrix.data + UnitOffset(matrix.layout, at, i);
    float scale = 0;
    std::memcpy(&scale, unit + sizeof(float) * (at % kPanelRows), sizeof scale);
    out[i] = F8E4M3ToFloat(static_cast<uint8_t>(unit[CodeOffset(at, i)])) * scale;
  }
}

}  // namespace moesaic::tensor
