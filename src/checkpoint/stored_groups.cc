#include "checkpoint/stored_groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace moesaic::checkpoint {
namespace {

using tensor::DType;
using tensor::GroupRows;
using tensor::PackedFormat;

// Where one row of what is read goes.
struct RowOut {
  uint8_t* codes;    // [in]
  uint16_t* scales;  // [groups]
  float* output_scale;
};

// The row of the file that is row `row` of the Hub's tensor.
int64_t FileRow(const TensorEntry& entry, int64_t row) {
  return entry.rows == nullptr ? row : entry.rows->FileRow(row);
}

// Q8_0 and Q4_0: blocks of 32 elements behind an f16 scale; a byte of Q4_0 holds elements i and i + 16.
void ReadGgmlRow(const LinearSource& source, int64_t row, const RowOut& out) {
  const TensorEntry& weight = *source.weight;
  const std::byte* block =
      weight.bytes.data() + tensor::BytesOf(weight.dtype, FileRow(weight, row) * source.in);
  const int block_bytes = tensor::BlockOf(weight.dtype).bytes;
  for (int64_t b = 0; b < source.in / 32; ++b, block += block_bytes) {
    std::memcpy(&out.scales[b], block, 2);
    const auto* codes = reinterpret_cast<const uint8_t*>(block + 2);
    uint8_t* to = out.codes + 32 * b;
    if (weight.dtype == DType::kQ8_0) {
      for (int i = 0; i < 32; ++i) to[i] = codes[i] ^ 0x80;  // + 128
    } else {
      for (int i = 0; i < 16; ++i) {
        to[i] = codes[i] & 15;
        to[i + 16] = codes[i] >> 4;
      }
    }
  }
}

float HalfOrBF16(DType dtype, uint16_t bits) {
  return dtype == DType::kF16 ? tensor::HalfToFloat(bits) : tensor::ToFloat(tensor::BF16{bits});
}

void ReadInt4Row(const LinearSource& source, int64_t row, const RowOut& out) {
  const int64_t words = (source.in + 7) / 8;
  const std::byte* codes = source.weight->bytes.data() + row * words * 4;
  for (int64_t i = 0; i < source.in; ++i) {
    const auto both = static_cast<unsigned>(codes[i / 2]);
    out.codes[i] = static_cast<uint8_t>(both >> (4 * (i % 2)) & 15U);
  }
  const int64_t stored = (source.in + source.block_cols - 1) / source.block_cols;
  const std::byte* scales = source.scale->bytes.data() + 2 * stored * row;
  auto scale = [&](int64_t group) {
    uint16_t bits = 0;
    std::memcpy(&bits, scales + 2 * group, 2);
    return HalfOrBF16(source.scale->dtype, bits);
  };
  float largest = 0;
  for (int64_t g = 0; g < stored; ++g) largest = std::max(largest, std::fabs(scale(g)));
  const float unit = largest > 0 && std::isfinite(largest) ? std::ldexp(1.0F, std::ilogb(largest)) : 1;
  *out.output_scale = unit;
  for (int64_t g = 0; g < (source.in + 31) / 32; ++g) {
    out.scales[g] = tensor::FloatToHalf(scale(32 * g / source.block_cols) / unit);
  }
}

void ReadNvfp4Row(const LinearSource& source, int64_t row, const RowOut& out) {
  const std::byte* codes = source.weight->bytes.data() + row * source.in / 2;
  for (int64_t i = 0; i < source.in; ++i) {
    out.codes[i] = static_cast<uint8_t>(static_cast<unsigned>(codes[i / 2]) >> (4 * (i % 2)) & 15U);
  }
  const std::byte* scales = source.scale->bytes.data() + row * (source.in / 16);
  for (int64_t g = 0; g < source.in / 16; ++g) out.scales[g] = static_cast<uint8_t>(scales[g]);
  *out.output_scale = 1 / source.global_scale;
}

bool IsFinite(PackedFormat format, uint16_t scale) {
  return format == PackedFormat::kNvfp4 ? (scale & 0x7f) != 0x7f : (scale & 0x7c00) != 0x7c00;
}

}  // namespace

std::optional<PackedFormat> StoredFormat(const LinearSource& source) {
  if (source.scheme == WeightScheme::kNvfp4) return PackedFormat::kNvfp4;
  if (source.scheme == WeightScheme::kInt4Packed) {
    const DType scale = source.scale->dtype;
    const bool whole = source.block_cols % 32 == 0 || source.block_cols >= source.in;
    const bool plain =
        source.zero_point == nullptr && source.group_index == nullptr && source.block_rows == 1;
    if (whole && plain && (scale == DType::kF16 || scale == DType::kBF16)) return PackedFormat::kI4G32;
    return std::nullopt;
  }
  if (source.scheme != WeightScheme::kPlain || source.in % 32 != 0) return std::nullopt;
  if (source.weight->rows != nullptr && source.weight->rows->FileRow(0) < 0) return std::nullopt;
  if (source.weight->dtype == DType::kQ8_0) return PackedFormat::kI8G32;
  if (source.weight->dtype == DType::kQ4_0) return PackedFormat::kI4G32;
  return std::nullopt;
}

Status ReadGroupRows(const LinearSource& source, int64_t first, int64_t count, GroupRows& out) {
  const std::optional<PackedFormat> format = StoredFormat(source);
  if (!format.has_value() || first < 0 || count < 0 || first + count > source.out) {
    return InvalidArgument("{}: groups of rows [{}, {}) can't be read", source.module, first, first + count);
  }
  out.Resize(*format, static_cast<int>(count), static_cast<int>(source.in));
  const auto groups = count > 0 ? std::ssize(out.scales) / count : 0;
  for (int64_t r = 0; r < count; ++r) {
    const RowOut to{&out.codes[r * source.in], &out.scales[r * groups], &out.output_scales[r]};
    if (source.scheme == WeightScheme::kNvfp4) {
      ReadNvfp4Row(source, first + r, to);
    } else if (source.scheme == WeightScheme::kInt4Packed) {
      ReadInt4Row(source, first + r, to);
    } else {
      ReadGgmlRow(source, first + r, to);
    }
    const auto finite = [&](uint16_t scale) { return IsFinite(*format, scale); };
    if (std::all_of(to.scales, to.scales + groups, finite)) continue;
    return DataLoss("{}: the scales of {} must be finite; those of row {} are not", source.weight->file,
                    source.module, first + r);
  }
  return OkStatus();
}

}  // namespace moesaic::checkpoint
