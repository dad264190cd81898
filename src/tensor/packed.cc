#include "tensor/packed.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/round.h"
#include "tensor/dtype.h"
#include "tensor/fp8_format.h"
#include "tensor/group_format.h"

namespace moesaic::tensor {
namespace {

constexpr int kGroupBytes = 4;  // bytes of one output in one group
constexpr int kLargestI8K = 65536;

int64_t RoundUp64(int64_t bytes) { return base::RoundUp(bytes, 64); }

// Formats that store scales apart from the elements.
int ElementBytes(PackedFormat format) {
  switch (format) {
    case PackedFormat::kF32:
      return 4;
    case PackedFormat::kBF16:
      return 2;
    default:
      return 1;
  }
}

// Returns the byte offset of element (row, k) from the matrix's start.
int64_t OffsetOf(const PackedLayout& layout, int row, int k) {
  const int group = kGroupBytes / ElementBytes(layout.format);
  return row / kPanelRows * layout.panel_bytes + int64_t{64} * (k / group) +
         kGroupBytes * (row % kPanelRows) + ElementBytes(layout.format) * (k % group);
}

// Writes a row of elements: its groups of 4 bytes are stored 64 bytes apart.
template <typename T>
void ScatterRow(const PackedLayout& layout, int row, const T* values, std::byte* out) {
  constexpr int kGroup = kGroupBytes / static_cast<int>(sizeof(T));
  std::byte* to = out + OffsetOf(layout, row, 0);
  int k = 0;
  for (; k + kGroup <= layout.k; k += kGroup, to += 64) std::memcpy(to, values + k, kGroupBytes);
  if (k < layout.k) std::memcpy(to, values + k, (layout.k - k) * sizeof(T));
}

int64_t PanelBytes(PackedFormat format, int k_padded) {
  if (format == PackedFormat::kF8G128) return k_padded / kFp8Inputs * kFp8UnitBytes;
  if (IsGroupScaled(format)) return GroupFormatOf(format).panel_bytes(k_padded);
  return int64_t{k_padded} * kPanelRows * ElementBytes(format);
}

void CheckRows(const PackedLayout& layout, int first_row, int rows) {
  MOESAIC_CHECK_EQ(first_row % kPanelRows, 0);
  MOESAIC_CHECK_GE(first_row, 0);
  MOESAIC_CHECK_LE(first_row + rows, layout.n);
}

void WriteRowI8(const PackedLayout& layout, int row, const int8_t* values, float scale, std::byte* out) {
  ScatterRow(layout, row, values, out);
  int32_t sum = 0;
  for (int i = 0; i < layout.k; ++i) sum += values[i];
  std::memcpy(out + layout.scales_offset + row * sizeof scale, &scale, sizeof scale);
  std::memcpy(out + layout.sums_offset + row * sizeof sum, &sum, sizeof sum);
}

float QuantizeRow(const float* values, int k, int8_t* out) {
  float amax = 0;
  for (int i = 0; i < k; ++i) amax = std::max(amax, std::fabs(values[i]));
  const float scale = amax / 127;
  for (int i = 0; i < k; ++i) {
    // A scale below the smallest float is 0, and so are the values. Near it, rounding of the scale may give
    // quotients beyond 127.
    const float q = scale > 0 ? std::nearbyint(values[i] / scale) : 0;
    out[i] = static_cast<int8_t>(std::clamp(q, -127.0F, 127.0F));
  }
  return scale;
}

}  // namespace

std::string PackedFormatName(PackedFormat format) {
  static constexpr const char* kNames[kPackedFormats] = {"f32",      "bf16",  "int8",  "fp8_g128", "int8_g32",
                                                         "int4_g32", "mxfp4", "nvfp4", "q4_k",     "q6_k"};
  return kNames[static_cast<int>(format)];
}

std::vector<std::string> QuantizableFormatNames() {
  std::vector<std::string> names;
  for (int f = 0; f < kPackedFormats; ++f) {
    const auto format = static_cast<PackedFormat>(f);
    if (CanQuantize(format)) names.push_back(PackedFormatName(format));
  }
  return names;
}

int ScaledInputs(PackedFormat format) {
  // Activations of group-scaled formats have one scale per 32 inputs.
  constexpr int kActivationGroup = 32;
  if (format == PackedFormat::kF8G128) return kFp8Inputs;
  if (!IsGroupScaled(format)) return 1;
  return GroupFormatOf(format).has_super ? kSuperUnits * kUnitInputs : kActivationGroup;
}

StatusOr<PackedFormat> ParsePackedFormat(const std::string& name) {
  for (int f = 0; f < kPackedFormats; ++f) {
    if (PackedFormatName(static_cast<PackedFormat>(f)) == name) return static_cast<PackedFormat>(f);
  }
  return InvalidArgument("unknown weight format \"{}\"", name);
}

PackedLayout PackedLayout::Of(PackedFormat format, int n, int k) {
  MOESAIC_CHECK_GE(n, 1);
  MOESAIC_CHECK_GE(k, 1);
  MOESAIC_CHECK(format != PackedFormat::kI8 || k <= kLargestI8K);
  PackedLayout layout{};
  layout.format = format;
  layout.n = n;
  layout.k = k;
  layout.n_padded = base::RoundUp(n, kPanelRows);
  layout.k_padded = base::RoundUp(k, format == PackedFormat::kF8G128 ? kFp8Inputs : kPackedKUnit);
  layout.panel_bytes = PanelBytes(format, layout.k_padded);
  layout.total_bytes = layout.panel_bytes * layout.panels();
  if (IsGroupScaled(format)) {
    layout.scales_offset = layout.total_bytes;
    layout.total_bytes = RoundUp64(layout.scales_offset + int64_t{4} * layout.n_padded);
  }
  if (format == PackedFormat::kI8) {
    layout.scales_offset = layout.total_bytes;
    layout.sums_offset = RoundUp64(layout.scales_offset + int64_t{4} * layout.n_padded);
    layout.total_bytes = RoundUp64(layout.sums_offset + int64_t{4} * layout.n_padded);
  }
  return layout;
}

PackedMatrix PackedMatrix::Rows(int first, int count) const {
  MOESAIC_CHECK_EQ(first % kPanelRows, 0);
  MOESAIC_CHECK_GE(first, 0);
  MOESAIC_CHECK_GE(count, 1);
  MOESAIC_CHECK_LE(first + count, layout.n);
  PackedMatrix run = *this;
  run.first_row += first;
  run.layout.n = count;
  run.layout.n_padded = base::RoundUp(count, kPanelRows);
  return run;
}

PackedMatrix PackedMatrix::At(int p, int node) const {
  if (images == 1) return p == 0 ? *this : Rows(p * kPanelRows, layout.n - p * kPanelRows);
  PackedMatrix at = *this;
  at.images = 1;
  at.image_stride = at.slice_panels = 0;
  if (slice_panels == 0) {
    at.data += node % images * image_stride;
    return at.At(p, 0);
  }
  const int panel = first_row / kPanelRows + p;
  const int slice = panel / slice_panels, inside = panel % slice_panels;
  at.data += slice * image_stride;
  at.first_row = inside * kPanelRows;
  at.layout.n = std::min(layout.n - p * kPanelRows, (slice_panels - inside) * kPanelRows);
  at.layout.n_padded = base::RoundUp(at.layout.n, kPanelRows);
  return at;
}

void PackRows(const PackedLayout& layout, int first_row, int rows, const float* values, std::byte* out) {
  CheckRows(layout, first_row, rows);
  if (IsGroupScaled(layout.format)) {
    const GroupRows groups = QuantizeGroups(layout.format, rows, layout.k, values);
    PackGroupRows(layout, first_row, groups, out);
    return;
  }
  if (layout.format == PackedFormat::kF8G128) {
    PackFp8Rows(layout, first_row, QuantizeFp8(rows, layout.k, values), out);
    return;
  }
  const int k = layout.k;
  std::vector<BF16> bf16(layout.format == PackedFormat::kBF16 ? k : 0);
  std::vector<int8_t> i8(layout.format == PackedFormat::kI8 ? k : 0);
  for (int r = 0; r < rows; ++r) {
    const float* row = values + int64_t{r} * k;
    switch (layout.format) {
      case PackedFormat::kF32:
        ScatterRow(layout, first_row + r, row, out);
        break;
      case PackedFormat::kBF16:
        std::transform(row, row + k, bf16.begin(), ToBF16);
        ScatterRow(layout, first_row + r, bf16.data(), out);
        break;
      case PackedFormat::kI8: {
        const float scale = QuantizeRow(row, k, i8.data());
        WriteRowI8(layout, first_row + r, i8.data(), scale, out);
        break;
      }
      default:
        break;
    }
  }
}

void PackColumns(const PackedLayout& layout, int first_row, int rows, const float* values, int k,
                 int first_column, std::byte* out) {
  if (IsGroupScaled(layout.format)) {
    const GroupRows groups = QuantizeGroups(layout.format, rows, k, values);
    PackGroupRows(layout, first_row, groups.Columns(layout.format, first_column, layout.k), out);
    return;
  }
  if (layout.format == PackedFormat::kF8G128) {
    PackFp8Rows(layout, first_row, QuantizeFp8(rows, k, values).Columns(first_column, layout.k), out);
    return;
  }
  if (layout.format != PackedFormat::kI8) {
    std::vector<float> columns(int64_t{rows} * layout.k);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(values + r * k + first_column, layout.k, columns.begin() + r * layout.k);
    }
    PackRows(layout, first_row, rows, columns.data(), out);
    return;
  }
  CheckRows(layout, first_row, rows);
  std::vector<int8_t> i8(k);
  for (int r = 0; r < rows; ++r) {
    const float scale = QuantizeRow(values + int64_t{r} * k, k, i8.data());
    WriteRowI8(layout, first_row + r, i8.data() + first_column, scale, out);
  }
}

void PackRowsI8(const PackedLayout& layout, int first_row, int rows, const int8_t* values,
                const float* scales, std::byte* out) {
  CheckRows(layout, first_row, rows);
  MOESAIC_CHECK(layout.format == PackedFormat::kI8);
  for (int r = 0; r < rows; ++r) {
    WriteRowI8(layout, first_row + r, values + int64_t{r} * layout.k, scales[r], out);
  }
}

namespace {

// Implements UnpackRow for a matrix in one contiguous piece of memory.
void UnpackWholeRow(const PackedMatrix& matrix, int row, std::span<float> out) {
  const PackedLayout& layout = matrix.layout;
  if (IsGroupScaled(layout.format)) return UnpackGroupRow(matrix, row, out);
  if (layout.format == PackedFormat::kF8G128) return UnpackFp8Row(matrix, row, out);
  for (int k = 0; k < layout.k; ++k) {
    const std::byte* element = matrix.data + OffsetOf(layout, matrix.first_row + row, k);
    switch (layout.format) {
      case PackedFormat::kF32:
        std::memcpy(&out[k], element, sizeof(float));
        break;
      case PackedFormat::kBF16: {
        BF16 value;
        std::memcpy(&value, element, sizeof value);
        out[k] = ToFloat(value);
        break;
      }
      case PackedFormat::kI8:
        out[k] = static_cast<float>(static_cast<int8_t>(*element)) * matrix.scales()[row];
        break;
      default:
        break;
    }
  }
}

}  // namespace

void UnpackRow(const PackedMatrix& matrix, int row, std::span<float> out) {
  MOESAIC_CHECK_LT(row, matrix.n());
  MOESAIC_CHECK_EQ(static_cast<int>(out.size()), matrix.k());
  UnpackWholeRow(matrix.At(row / kPanelRows, 0), row % kPanelRows, out);
}

}  // namespace moesaic::tensor
