#include "tensor/group_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "tensor/dtype.h"

namespace moesaic::tensor {
namespace {

constexpr float kLargestE2M1 = 6, kLargestE4M3 = 448;

int GroupsOf(const GroupFormat& format, int k) { return (k + format.group - 1) / format.group; }

int SupersOf(int k) { return (k + kSuperUnits * kUnitInputs - 1) / (kSuperUnits * kUnitInputs); }

bool IsE2M1(PackedFormat format) { return format == PackedFormat::kMxfp4 || format == PackedFormat::kNvfp4; }

float ValueOf(PackedFormat format, uint8_t code) {
  if (IsE2M1(format)) return kE2M1[code & 15];
  return static_cast<float>(code - GroupFormatOf(format).zero);
}

float ScaleOf(PackedFormat format, uint16_t bits) {
  switch (format) {
    case PackedFormat::kNvfp4:
      return F8E4M3ToFloat(static_cast<uint8_t>(bits));
    case PackedFormat::kQ4K:
      return bits;
    case PackedFormat::kQ6K:
      return static_cast<int8_t>(bits);
    default:
      return HalfToFloat(bits);
  }
}

// Returns the value with the largest magnitude.
float Extreme(std::span<const float> values) {
  return *std::max_element(values.begin(), values.end(),
                           [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

// Returns a power of two that brings the largest scale of the row's groups near 1, where f16 has full
// precision. For kNvfp4 the largest scale maps to the end of e4m3.
float OutputScale(PackedFormat format, std::span<const float> row) {
  const float amax = std::fabs(Extreme(row));
  if (amax == 0) return 1;
  if (format == PackedFormat::kNvfp4) {
    const float scale = amax / (kLargestE2M1 * kLargestE4M3);
    return scale > 0 ? scale : 1;
  }
  const int code_bits = format == PackedFormat::kI8G32 ? 7 : format == PackedFormat::kI4G32 ? 3 : 2;
  return std::ldexp(1.0F, std::clamp(std::ilogb(amax) - code_bits, -126, 127));
}

uint16_t GroupScale(PackedFormat format, float extreme, float output_scale) {
  const float amax = std::fabs(extreme) / output_scale;
  switch (format) {
    case PackedFormat::kI8G32:
      return FloatToHalf(amax / 127);
    case PackedFormat::kI4G32:
      return FloatToHalf(extreme / output_scale / -8);
    case PackedFormat::kMxfp4:  // OCP MX 1.0, 6.3: the exponent of amax minus that of 6
      return amax > 0 ? FloatToHalf(std::ldexp(1.0F, std::ilogb(amax) - 2)) : 0;
    default:
      return FloatToF8E4M3(amax / kLargestE2M1);
  }
}

uint8_t CodeOf(PackedFormat format, float value, float scale) {
  const float q = scale != 0 ? value / scale : 0;
  if (IsE2M1(format)) return FloatToE2M1(q);
  const GroupFormat& f = GroupFormatOf(format);
  const float least = format == PackedFormat::kI8G32 ? -127.0F : -8.0F;
  return static_cast<uint8_t>(std::clamp(std::nearbyint(q), least, static_cast<float>(f.zero - 1)) +
                              static_cast<float>(f.zero));
}

// Addresses the codes of output `row` in one unit of a panel.
template <typename Byte>
struct UnitView {
  Byte* unit;
  int row;

  Byte* Scale(int group, int bytes) const { return unit + bytes * (kPanelRows * group + row); }
  Byte* Codes8(int i) const { return unit + kUnitScaleBytes + 16 * i + 4 * row; }      // of inputs [i, i + 4)
  Byte* Codes4(int i) const { return unit + kUnitScaleBytes + 8 * i + 4 * row; }       // of inputs [i, i + 8)
  Byte* High2(int i) const { return unit + kUnitScaleBytes + 512 + 4 * i + 4 * row; }  // [i, i + 16)
  Byte* Minimum(int group) const { return unit + kPanelRows * (2 + group) + row; }
};

template <typename Byte>
UnitView<Byte> UnitOf(const PackedLayout& layout, int row, int unit, Byte* data) {
  const int64_t offset = GroupFormatOf(layout.format).unit_offset(unit);
  return {data + row / kPanelRows * layout.panel_bytes + offset, row % kPanelRows};
}

// Returns the f16 factor of scales (which = 0) or minima (which = 1) of the 256 inputs that contain `unit`.
template <typename Byte>
Byte* SuperOf(const PackedLayout& layout, int row, int unit, int which, Byte* data) {
  const int64_t offset =
      GroupFormatOf(layout.format).unit_offset(unit / kSuperUnits * kSuperUnits) - kSuperBytes;
  return data + row / kPanelRows * layout.panel_bytes + offset + 32 * which + 2 * (row % kPanelRows);
}

// Returns the code of input `i` of a unit.
uint8_t CodeAt(const UnitView<const std::byte>& view, int code_bits, int i) {
  if (code_bits == 8) return static_cast<uint8_t>(view.Codes8(i / 4 * 4)[i % 4]);
  const auto both = static_cast<unsigned>(view.Codes4(i / 8 * 8)[i % 4]);
  const unsigned low = both >> (i % 8 < 4 ? 0 : 4) & 15U;
  if (code_bits == 4) return static_cast<uint8_t>(low);
  const auto high = static_cast<unsigned>(view.High2(i / 16 * 16)[i % 4]) >> (i % 16 / 4 * 2) & 3U;
  return static_cast<uint8_t>(low | high << 4);
}

// Stores eight codes that begin at input `i` of a unit.
void PutCodes(const UnitView<std::byte>& view, int code_bits, int i, const uint8_t (&codes)[8]) {
  if (code_bits == 8) {
    std::memcpy(view.Codes8(i), codes, 4);
    std::memcpy(view.Codes8(i + 4), codes + 4, 4);
    return;
  }
  uint32_t low = 0, high = 0;
  std::memcpy(&low, codes, 4);
  std::memcpy(&high, codes + 4, 4);
  const uint32_t four = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
  std::memcpy(view.Codes4(i), &four, 4);
  if (code_bits == 4) return;
  uint32_t two = 0;
  std::memcpy(&two, view.High2(i / 16 * 16), 4);
  const int shift = i % 16 / 4 * 2;
  two |= (low >> 4 & 0x03030303) << shift | (high >> 4 & 0x03030303) << (shift + 2);
  std::memcpy(view.High2(i / 16 * 16), &two, 4);
}

}  // namespace

const GroupFormat& GroupFormatOf(PackedFormat format) {
  static constexpr GroupFormat kFormats[] = {{32, 8, 128, 2, false, false}, {32, 4, 8, 2, false, false},
                                             {32, 4, 12, 2, false, false},  {16, 4, 12, 1, false, false},
                                             {32, 4, 0, 1, true, true},     {16, 6, 32, 1, true, false}};
  MOESAIC_CHECK(IsGroupScaled(format));
  return kFormats[static_cast<int>(format) - static_cast<int>(PackedFormat::kI8G32)];
}

uint8_t FloatToE2M1(float value) {
  const float magnitude = std::fabs(value);
  uint8_t code = 0;
  while (code < 7) {
    const float middle = (kE2M1[code] + kE2M1[code + 1]) / 2;
    if (magnitude < middle || (magnitude == middle && code % 2 == 0)) break;
    ++code;
  }
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

void GroupRows::Resize(PackedFormat format, int new_rows, int new_k) {
  rows = new_rows;
  k = new_k;
  codes.resize(size_t(rows) * k);
  scales.resize(size_t(rows) * GroupsOf(GroupFormatOf(format), k));
  output_scales.assign(rows, 1.0F);
  const GroupFormat& f = GroupFormatOf(format);
  minima.resize(f.has_minimum ? scales.size() : 0);
  supers.resize(f.has_super ? size_t(rows) * SupersOf(k) * 2 : 0);
}

GroupRows GroupRows::Columns(PackedFormat format, int first, int count) const {
  MOESAIC_CHECK_EQ(first % ScaledInputs(format), 0);
  const GroupFormat& f = GroupFormatOf(format);
  GroupRows part;
  part.Resize(format, rows, count);
  part.output_scales = output_scales;
  // Copies elements [first_element, + part_row) of each row of `from`, whose rows have `row` elements.
  const auto copy = [&](const auto& from, int64_t row, int64_t first_element, auto& to, int64_t part_row) {
    for (int r = 0; r < rows; ++r) {
      std::copy_n(from.begin() + r * row + first_element, part_row, to.begin() + r * part_row);
    }
  };
  copy(codes, k, first, part.codes, count);
  copy(scales, GroupsOf(f, k), first / f.group, part.scales, GroupsOf(f, count));
  if (f.has_minimum) copy(minima, GroupsOf(f, k), first / f.group, part.minima, GroupsOf(f, count));
  constexpr int kSuperInputs = kSuperUnits * kUnitInputs;
  if (f.has_super)
    copy(supers, 2 * SupersOf(k), 2 * (first / kSuperInputs), part.supers, 2 * SupersOf(count));
  return part;
}

GroupRows QuantizeGroups(PackedFormat format, int rows, int k, const float* values) {
  MOESAIC_CHECK(CanQuantize(format));
  const GroupFormat& f = GroupFormatOf(format);
  const int groups = GroupsOf(f, k);
  GroupRows result;
  result.Resize(format, rows, k);
  for (int r = 0; r < rows; ++r) {
    const std::span<const float> row(values + int64_t{r} * k, k);
    const float output_scale = OutputScale(format, row);
    result.output_scales[r] = output_scale;
    for (int g = 0; g < groups; ++g) {
      const auto group = row.subspan(g * f.group, std::min(f.group, k - g * f.group));
      const uint16_t bits = GroupScale(format, Extreme(group), output_scale);
      result.scales[int64_t{r} * groups + g] = bits;
      const float scale = ScaleOf(format, bits) * output_scale;
      uint8_t* codes = &result.codes[int64_t{r} * k + g * f.group];
      for (const float value : group) *codes++ = CodeOf(format, value, scale);
    }
  }
  return result;
}

void PackGroupRows(const PackedLayout& layout, int first_row, const GroupRows& rows, std::byte* out) {
  MOESAIC_CHECK_EQ(first_row % kPanelRows, 0);
  MOESAIC_CHECK_LE(first_row + rows.rows, layout.n);
  MOESAIC_CHECK_EQ(rows.k, layout.k);
  const GroupFormat& f = GroupFormatOf(layout.format);
  const int groups = GroupsOf(f, layout.k);
  for (int r = 0; r < rows.rows; ++r) {
    const uint8_t* codes = &rows.codes[int64_t{r} * rows.k];
    for (int g = 0; g < groups; ++g) {
      const int first = g * f.group;
      const UnitView<std::byte> view = UnitOf(layout, first_row + r, first / kUnitInputs, out);
      uint16_t scale = rows.scales[int64_t{r} * groups + g];
      uint8_t flip = 0;
      if (layout.format == PackedFormat::kNvfp4 && (scale & 0x80) != 0) {
        scale &= 0x7f;
        flip = 8;
      }
      std::memcpy(view.Scale(g % f.groups_per_unit(), f.scale_bytes), &scale, f.scale_bytes);
      if (f.has_minimum) {
        *view.Minimum(g % f.groups_per_unit()) = static_cast<std::byte>(rows.minima[int64_t{r} * groups + g]);
      }
      for (int i = first; i < std::min(first + f.group, rows.k); i += 8) {
        uint8_t eight[8] = {};
        std::transform(codes + i, codes + std::min(i + 8, rows.k), eight,
                       [flip](uint8_t code) { return static_cast<uint8_t>(code ^ flip); });
        PutCodes(view, f.code_bits, i % kUnitInputs, eight);
      }
    }
    for (int s = 0; f.has_super && s < SupersOf(rows.k); ++s) {
      for (int which : {0, 1}) {
        const uint16_t bits = rows.supers[(int64_t{r} * SupersOf(rows.k) + s) * 2 + which];
        std::memcpy(SuperOf(layout, first_row + r, s * kSuperUnits, which, out), &bits, sizeof bits);
      }
    }
    std::memcpy(out + layout.scales_offset + (first_row + r) * sizeof(float), &rows.output_scales[r],
                sizeof(float));
  }
}

void UnpackGroupRow(const PackedMatrix& matrix, int row, std::span<float> out) {
  const PackedLayout& layout = matrix.layout;
  const GroupFormat& f = GroupFormatOf(layout.format);
  for (int i = 0; i < layout.k; ++i) {
    const auto view = UnitOf(layout, matrix.first_row + row, i / kUnitInputs, matrix.data);
    const int in_unit = i % kUnitInputs;
    uint16_t bits = 0;
    std::memcpy(&bits, view.Scale(in_unit / f.group, f.scale_bytes), f.scale_bytes);
    const float value = ValueOf(layout.format, CodeAt(view, f.code_bits, in_unit));
    float scale = ScaleOf(layout.format, bits), minimum = 0;
    if (f.has_super) {
      const auto super = [&](int which) {
        uint16_t half = 0;
        std::memcpy(&half, SuperOf(layout, matrix.first_row + row, i / kUnitInputs, which, matrix.data), 2);
        return HalfToFloat(half);
      };
      scale *= super(0);
      if (f.has_minimum) minimum = static_cast<float>(*view.Minimum(in_unit / f.group)) * super(1);
    }
    out[i] = (value * scale - minimum) * matrix.scales()[row];
  }
}

}  // namespace moesaic::tensor
