#include "checkpoint/stored_groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/round.h"
#include "checkpoint/ggml_blocks.h"
#include "checkpoint/linear_source.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;
using tensor::GroupRows;
using tensor::PackedFormat;

// Destinations of one row.
struct RowOut {
  uint8_t* codes;    // [in]
  uint16_t* scales;  // [groups]
  float* output_scale;
  uint8_t* minima;   // [groups], Q4_K
  uint16_t* supers;  // [in / 256][2], Q4_K and Q6_K
};

// Returns the blocks of the Hub's row `row`, which the file may store elsewhere.
const uint8_t* BlocksOfRow(const LinearSource& source, int64_t row) {
  const TensorEntry& weight = *source.weight;
  const int64_t stored = weight.rows == nullptr ? row : weight.rows->FileRow(row);
  return reinterpret_cast<const uint8_t*>(weight.bytes.data() +
                                          tensor::BytesOf(weight.dtype, stored * source.in));
}

// Unpacks two codes per byte, the first from the low half.
void ReadNibbles(const std::byte* row, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(static_cast<unsigned>(row[i / 2]) >> (4 * (i % 2)) & 15U);
  }
}

// Q8_0 and Q4_0: an f16 scale, then 32 elements per block; a byte of Q4_0 holds elements i and i + 16.
void ReadGgmlRow(const LinearSource& source, int64_t row, const RowOut& out) {
  const DType dtype = source.weight->dtype;
  const uint8_t* block = BlocksOfRow(source, row);
  for (int64_t b = 0; b < source.in / 32; ++b, block += tensor::BlockOf(dtype).bytes) {
    std::memcpy(&out.scales[b], block, 2);
    const uint8_t* codes = block + 2;
    uint8_t* to = out.codes + 32 * b;
    if (dtype == DType::kQ8_0) {
      for (int i = 0; i < 32; ++i) to[i] = codes[i] ^ 0x80;  // + 128
    } else {
      for (int i = 0; i < 16; ++i) {
        to[i] = codes[i] & 15;
        to[i + 16] = codes[i] >> 4;
      }
    }
  }
}

// A scale 2^(e - 127), then 16 bytes of elements i and i + 16. The output's largest scale becomes 2^15, the
// largest power of two of f16; blocks of zeros do not count. Scales below 2^-39 of it become 0. A scale byte
// of 255 is NaN: ReadGroupRows rejects it, while DequantizeBlocks reads 2^128 like ggml.
void ReadMxfp4Row(const LinearSource& source, int64_t row, const RowOut& out) {
  constexpr int kBytes = 17, kNaN = 255;
  const uint8_t* blocks = BlocksOfRow(source, row);
  int largest = -1;
  for (int64_t b = 0; b < source.in / 32; ++b) {
    const uint8_t* block = blocks + kBytes * b;
    uint8_t any = 0;
    for (int i = 0; i < 16; ++i) {
      out.codes[32 * b + i] = block[1 + i] & 15;
      out.codes[32 * b + i + 16] = block[1 + i] >> 4;
      any |= block[1 + i] & 0x77;  // ignores signs
    }
    out.scales[b] = any == 0 ? kNaN + 1 : block[0];
    if (any != 0) largest = std::max<int>(largest, block[0]);
  }
  const int unit = std::max(largest - 127 - 15, -126);
  *out.output_scale = std::ldexp(1.0F, unit);
  for (int64_t b = 0; b < source.in / 32; ++b) {
    const int e = out.scales[b];
    out.scales[b] = e > kNaN ? 0 : e == kNaN ? 0x7e00 : tensor::FloatToHalf(std::ldexp(1.0F, e - 127 - unit));
  }
}

// 256 elements: d, dmin, 12 bytes of scales and minima, then four times 32 bytes of elements i and i + 32.
void ReadQ4KBlock(const uint8_t* block, const RowOut& out, int64_t b) {
  std::memcpy(&out.supers[2 * b], block, 4);
  for (int i = 0; i < 8; ++i) {
    int scale = 0, minimum = 0;
    ScaleMinK4(block + 4, i, &scale, &minimum);
    out.scales[8 * b + i] = static_cast<uint16_t>(scale);
    out.minima[8 * b + i] = static_cast<uint8_t>(minimum);
  }
  for (int i = 0; i < 128; ++i) {
    uint8_t* to = out.codes + 256 * b + 64 * (i / 32) + i % 32;
    to[0] = block[16 + i] & 15;
    to[32] = block[16 + i] >> 4;
  }
}

// 256 elements: 128 bytes of low halves, 64 of high bits, 16 scales, d. In each half, byte l < 32 of the high
// bits belongs to elements l, l + 32, l + 64 and l + 96.
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
  const DType dtype = source.weight->dtype;
  const uint8_t* block = BlocksOfRow(source, row);
  for (int64_t b = 0; b < source.in / 256; ++b, block += tensor::BlockOf(dtype).bytes) {
    if (dtype == DType::kQ4K) {
      ReadQ4KBlock(block, out, b);
    } else {
      ReadQ6KBlock(block, out, b);
    }
  }
}

// Unpacks offset codes of 4 or 8 bits from compressed-tensors' 32-bit words.
void ReadPackedRow(const LinearSource& source, int64_t row, const RowOut& out) {
  const int64_t words = base::CeilDiv(source.in, 32 / source.bits);
  const std::byte* in = source.weight->bytes.data() + row * words * 4;
  if (source.bits == 8) {
    std::memcpy(out.codes, in, static_cast<size_t>(source.in));
  } else {
    ReadNibbles(in, source.in, out.codes);
  }
  const int64_t stored = base::CeilDiv(source.in, source.block_cols), groups = base::CeilDiv(source.in, 32);
  const auto scale = [&](int64_t group) { return ScalarAt(*source.scale, row * stored + group); };
  if (stored == 1) {  // the output's only scale: exact in any type
    *out.output_scale = scale(0);
    std::fill_n(out.scales, groups, tensor::FloatToHalf(1));
    return;
  }
  // f16 scales are kept; bf16 and f32 have a larger range and get a power of two per output.
  float largest = 0;
  for (int64_t g = 0; g < stored && source.scale->dtype != DType::kF16; ++g)
    largest = std::max(largest, std::fabs(scale(g)));
  const float unit = largest > 0 && std::isfinite(largest) ? std::ldexp(1.0F, std::ilogb(largest)) : 1;
  *out.output_scale = unit;
  for (int64_t g = 0; g < groups; ++g) {
    out.scales[g] = tensor::FloatToHalf(scale(32 * g / source.block_cols) / unit);
  }
}

void ReadNvfp4Row(const LinearSource& source, int64_t row, const RowOut& out) {
  ReadNibbles(source.weight->bytes.data() + row * source.in / 2, source.in, out.codes);
  const std::byte* scales = source.scale->bytes.data() + row * (source.in / 16);
  for (int64_t g = 0; g < source.in / 16; ++g) out.scales[g] = static_cast<uint8_t>(scales[g]);
  *out.output_scale = 1 / source.global_scale;
}

// Both the factor of an output's sum in a kernel, up to 128 times the scale, and the largest weight must be
// finite.
bool IsUsable(float output_scale) { return std::isfinite(output_scale * 0x1p25F); }

bool IsFiniteHalf(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

bool IsFinite(PackedFormat format, uint16_t scale) {
  if (format == PackedFormat::kNvfp4) return (scale & 0x7f) != 0x7f;
  if (tensor::GroupFormatOf(format).has_super) return true;  // an integer, always finite
  return IsFiniteHalf(scale);
}

}  // namespace

std::optional<PackedFormat> StoredFormat(const LinearSource& source) {
  if (source.scheme == WeightScheme::kFp8Block) {
    const bool whole = source.block_cols % tensor::kFp8Inputs == 0 || source.block_cols >= source.in;
    return whole ? std::optional(PackedFormat::kF8G128) : std::nullopt;
  }
  if (source.scheme == WeightScheme::kNvfp4) return PackedFormat::kNvfp4;
  if (source.scheme == WeightScheme::kIntPacked) {
    const bool whole = source.block_cols % 32 == 0 || source.block_cols >= source.in;
    const bool plain =
        source.zero_point == nullptr && source.group_index == nullptr && source.block_rows == 1;
    if (!whole || !plain) return std::nullopt;
    return source.bits == 8 ? PackedFormat::kI8G32 : PackedFormat::kI4G32;
  }
  if (source.scheme != WeightScheme::kPlain || source.in % 32 != 0) return std::nullopt;
  if (source.weight->rows != nullptr && source.weight->rows->FileRow(0) < 0) return std::nullopt;
  if (source.weight->dtype == DType::kQ8_0) return PackedFormat::kI8G32;
  if (source.weight->dtype == DType::kQ4_0) return PackedFormat::kI4G32;
  if (source.weight->dtype == DType::kQ4K) return PackedFormat::kQ4K;
  if (source.weight->dtype == DType::kQ6K) return PackedFormat::kQ6K;
  if (source.weight->dtype == DType::kMxfp4) return PackedFormat::kMxfp4;
  return std::nullopt;
}

Status ReadGroupRows(const LinearSource& source, int64_t first, int64_t count, GroupRows& out) {
  const std::optional<PackedFormat> format = StoredFormat(source);
  if (!format.has_value() || !tensor::IsGroupScaled(*format) || first < 0 || count < 0 ||
      first + count > source.out) {
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
    } else if (source.scheme == WeightScheme::kIntPacked) {
      ReadPackedRow(source, first + r, to);
    } else if (supers > 0) {
      ReadKRow(source, first + r, to);
    } else if (source.weight->dtype == DType::kMxfp4) {
      ReadMxfp4Row(source, first + r, to);
    } else {
      ReadGgmlRow(source, first + r, to);
    }
    const auto finite = [&](uint16_t scale) { return IsFinite(*format, scale); };
    if (IsUsable(*to.output_scale) && std::all_of(to.scales, to.scales + groups, finite) &&
        std::all_of(to.supers, to.supers + supers, IsFiniteHalf)) {
      continue;
    }
    return DataLoss("{}: the scales of {} must be finite; those of row {} are not", source.weight->file,
                    source.module, first + r);
  }
  return OkStatus();
}

Status ReadFp8Rows(const LinearSource& source, int64_t first, int64_t count, tensor::Fp8Rows& out) {
  if (StoredFormat(source) != PackedFormat::kF8G128 || first < 0 || count < 0 || first + count > source.out) {
    return InvalidArgument("{}: FP8 rows [{}, {}) can't be read", source.module, first, first + count);
  }
  out.Resize(static_cast<int>(count), static_cast<int>(source.in));
  const int64_t blocks = (source.in + source.block_cols - 1) / source.block_cols;
  const auto bad = [&](const char* what, int64_t row) {
    return DataLoss("{}: {} of {} must be finite; those of row {} are not", source.weight->file, what,
                    source.module, row);
  };
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = first + r;
    uint8_t* codes = &out.codes[r * source.in];
    std::memcpy(codes, source.weight->bytes.data() + row * source.in, source.in);
    const auto is_nan = [](uint8_t code) { return (code & 0x7f) == 0x7f; };
    if (std::any_of(codes, codes + source.in, is_nan)) return bad("the weights", row);
    for (int g = 0; g < out.groups(); ++g) {
      const int64_t block = int64_t{g} * tensor::kFp8Inputs / source.block_cols;
      const float scale = ScalarAt(*source.scale, row / source.block_rows * blocks + block);
      if (!std::isfinite(scale)) return bad("the scales", row);
      out.scales[r * out.groups() + g] = scale;
    }
  }
  return OkStatus();
}

}  // namespace moesaic::checkpoint
