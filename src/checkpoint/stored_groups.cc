#include "checkpoint/stored_groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

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
  uint8_t* minima;   // [groups], Q4_K
  uint16_t* supers;  // [in / 256][2], Q4_K and Q6_K
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

// The 6-bit scale and minimum of sub-block `i` of a Q4_K block: the first four stand in the low bits of bytes
// i and i + 4, the others in pieces.
std::pair<uint8_t, uint8_t> ScaleAndMinimum(const uint8_t* packed, int i) {
  if (i < 4) return {packed[i] & 63, packed[i + 4] & 63};
  const int scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
  const int minimum = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
  return {static_cast<uint8_t>(scale), static_cast<uint8_t>(minimum)};
}

// 256 elements: d, dmin, 12 bytes of scales and minima, then four times 32 bytes of elements i and i + 32.
void ReadQ4KBlock(const uint8_t* block, const RowOut& out, int64_t b) {
  std::memcpy(&out.supers[2 * b], block, 4);
  for (int i = 0; i < 8; ++i) {
    const auto [scale, minimum] = ScaleAndMinimum(block + 4, i);
    out.scales[8 * b + i] = scale;
    out.minima[8 * b + i] = minimum;
  }
  for (int i = 0; i < 128; ++i) {
    uint8_t* to = out.codes + 256 * b + 64 * (i / 32) + i % 32;
    to[0] = block[16 + i] & 15;
    to[32] = block[16 + i] >> 4;
  }
}

// 256 elements: 128 bytes of low halves, 64 of high bits, 16 scales, d. Of each half, byte l < 32 of the high
// bits goes with elements l, l + 32, l + 64 and l + 96.
void ReadQ6KBlock(const uint8_t* block, const RowOut& out, int64_t b) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    uint8_t* to = out.codes + 256 * b + 128 * half;
    for (int l = 0; l < 32; ++l) {
      to[l] = static_cast<uint8_t>((low[l] & 15) | (high[l] & 3) << 4);
      to[l + 32] = static_cast<uint8_t>((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4);
      to[l + 64] = static_cast<uint8_t>(low[l] >> 4 | (high[l] >> 4 & 3) << 4);
      to[l + 96] = static_cast<uint8_t>(low[l + 32] >> 4 | (high[l] >> 6) << 4);
    }
  }
  for (int i = 0; i < 16; ++i) out.scales[16 * b + i] = block[192 + i];
  std::memcpy(&out.supers[2 * b], block + 208, 2);
  out.supers[2 * b + 1] = 0;
}

void ReadKRow(const LinearSource& source, int64_t row, const RowOut& out) {
  const TensorEntry& weight = *source.weight;
  const auto* block = reinterpret_cast<const uint8_t*>(
      weight.bytes.data() + tensor::BytesOf(weight.dtype, FileRow(weight, row) * source.in));
  for (int64_t b = 0; b < source.in / 256; ++b, block += tensor::BlockOf(weight.dtype).bytes) {
    if (weight.dtype == DType::kQ4K) {
      ReadQ4KBlock(block, out, b);
    } else {
      ReadQ6KBlock(block, out, b);
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
  // f16 stays as it is; bf16 reaches further, and gets a power of two beside it.
  float largest = 0;
  for (int64_t g = 0; g < stored && source.scale->dtype == DType::kBF16; ++g)
    largest = std::max(largest, std::fabs(scale(g)));
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

// What a kernel multiplies an output's sum by, up to 128 times its scale, and the largest weight are finite.
bool IsUsable(float output_scale) { return std::isfinite(output_scale * 0x1p25F); }

bool IsFinite(PackedFormat format, uint16_t scale) {
  if (format == PackedFormat::kNvfp4) return (scale & 0x7f) != 0x7f;
  if (format == PackedFormat::kQ4K || format == PackedFormat::kQ6K) return true;  // integers
  return (scale & 0x7c00) != 0x7c00;
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
  if (source.weight->dtype == DType::kQ4K) return PackedFormat::kQ4K;
  if (source.weight->dtype == DType::kQ6K) return PackedFormat::kQ6K;
  return std::nullopt;
}

Status ReadGroupRows(const LinearSource& source, int64_t first, int64_t count, GroupRows& out) {
  const std::optional<PackedFormat> format = StoredFormat(source);
  if (!format.has_value() || first < 0 || count < 0 || first + count > source.out) {
    return InvalidArgument("{}: groups of rows [{}, {}) can't be read", source.module, first, first + count);
  }
  out.Resize(*format, static_cast<int>(count), static_cast<int>(source.in));
  const auto groups = count > 0 ? std::ssize(out.scales) / count : 0;
  const auto supers = count > 0 ? std::ssize(out.supers) / count : 0;
  for (int64_t r = 0; r < count; ++r) {
    const RowOut to{&out.codes[r * source.in], &out.scales[r * groups], &out.output_scales[r],
                    out.minima.empty() ? nullptr : &out.minima[r * groups],
                    out.supers.empty() ? nullptr : &out.supers[r * supers]};
    if (source.scheme == WeightScheme::kNvfp4) {
      ReadNvfp4Row(source, first + r, to);
    } else if (source.scheme == WeightScheme::kInt4Packed) {
      ReadInt4Row(source, first + r, to);
    } else if (supers > 0) {
      ReadKRow(source, first + r, to);
    } else {
      ReadGgmlRow(source, first + r, to);
    }
    const auto finite = [&](uint16_t scale) { return IsFinite(*format, scale); };
    const auto half = [](uint16_t bits) { return (bits & 0x7c00) != 0x7c00; };
    if (IsUsable(*to.output_scale) && std::all_of(to.scales, to.scales + groups, finite) &&
        std::all_of(to.supers, to.supers + supers, half)) {
      continue;
    }
    return DataLoss("{}: the scales of {} must be finite; those of row {} are not", source.weight->file,
                    source.module, first + r);
  }
  return OkStatus();
}

}  // namespace moesaic::checkpoint
