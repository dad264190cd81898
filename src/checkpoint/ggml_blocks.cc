#include "checkpoint/ggml_blocks.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;

// Layouts follow ggml-common.h (ggml-org/llama.cpp): 32-element blocks with one f16 scale, and "K" blocks of
// 256 elements whose sub-blocks have their own scales.
using Bytes = const uint8_t*;

uint16_t U16(Bytes p) {
  uint16_t value = 0;
  std::memcpy(&value, p, 2);
  return value;
}

float Half(Bytes p) { return tensor::HalfToFloat(U16(p)); }

void Q4_0(Bytes b, float* y) {
  const float d = Half(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>((b[2 + i] & 15) - 8) * d;
    y[i + 16] = static_cast<float>((b[2 + i] >> 4) - 8) * d;
  }
}

void Q4_1(Bytes b, float* y) {
  const float d = Half(b), m = Half(b + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(b[4 + i] & 15) * d + m;
    y[i + 16] = static_cast<float>(b[4 + i] >> 4) * d + m;
  }
}

uint32_t U32(Bytes p) {
  uint32_t value = 0;
  std::memcpy(&value, p, 4);
  return value;
}

void Q5_0(Bytes b, float* y) {
  const float d = Half(b);
  const uint32_t high = U32(b + 2);
  for (int i = 0; i < 16; ++i) {
    const int low_bit = static_cast<int>(high >> i & 1) << 4,
              high_bit = static_cast<int>(high >> (i + 16) & 1) << 4;
    y[i] = static_cast<float>(((b[6 + i] & 15) | low_bit) - 16) * d;
    y[i + 16] = static_cast<float>(((b[6 + i] >> 4) | high_bit) - 16) * d;
  }
}

void Q5_1(Bytes b, float* y) {
  const float d = Half(b), m = Half(b + 2);
  const uint32_t high = U32(b + 4);
  for (int i = 0; i < 16; ++i) {
    const int low_bit = static_cast<int>(high >> i & 1) << 4,
              high_bit = static_cast<int>(high >> (i + 16) & 1) << 4;
    y[i] = static_cast<float>((b[8 + i] & 15) | low_bit) * d + m;
    y[i + 16] = static_cast<float>((b[8 + i] >> 4) | high_bit) * d + m;
  }
}

void Q8_0(Bytes b, float* y) {
  const float d = Half(b);
  for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(static_cast<int8_t>(b[2 + i])) * d;
}

// Scales and quants of Q2_K: 16 bytes of 4-bit scales and minima, 64 bytes of 2-bit quants, d, dmin.
void Q2K(Bytes b, float* y) {
  const float d = Half(b + 80), dmin = Half(b + 82);
  Bytes q = b + 16;
  int scale = 0;
  for (int half = 0; half < 2; ++half, q += 32) {
    for (int shift = 0; shift < 8; shift += 2) {
      for (int part = 0; part < 2; ++part) {
        const uint8_t sc = b[scale++];
        const float dl = d * static_cast<float>(sc & 15), ml = dmin * static_cast<float>(sc >> 4);
        for (int i = 0; i < 16; ++i) *y++ = dl * static_cast<float>((q[16 * part + i] >> shift) & 3) - ml;
      }
    }
  }
}

// Q3_K: 32 bytes of high bits, 64 bytes of 2-bit quants, 12 bytes of 6-bit scales, d.
void Q3K(Bytes b, float* y) {
  const float d = Half(b + 108);
  Bytes high = b, q = b + 32, packed = b + 96;
  std::array<int, 16> scales{};
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
    const int top = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
    scales[i] = (low | top << 4) - 32;
  }
  int scale = 0, bit = 0;
  for (int half = 0; half < 2; ++half, q += 32) {
    for (int shift = 0; shift < 8; shift += 2, ++bit) {
      for (int part = 0; part < 2; ++part) {
        const float dl = d * static_cast<float>(scales[scale++]);
        for (int i = 0; i < 16; ++i) {
          const int at = 16 * part + i;
          const int value = ((q[at] >> shift) & 3) - ((high[at] >> bit & 1) != 0 ? 0 : 4);
          *y++ = dl * static_cast<float>(value);
        }
      }
    }
  }
}

void Q4K(Bytes b, float* y) {
  const float d = Half(b), dmin = Half(b + 2);
  Bytes q = b + 16;
  for (int j = 0; j < 8; j += 2, q += 32) {
    for (int part = 0; part < 2; ++part) {
      int scale = 0, min = 0;
      ScaleMinK4(b + 4, j + part, &scale, &min);
      const float dl = d * static_cast<float>(scale), ml = dmin * static_cast<float>(min);
      for (int i = 0; i < 32; ++i) *y++ = dl * static_cast<float>(q[i] >> (4 * part) & 15) - ml;
    }
  }
}

void Q5K(Bytes b, float* y) {
  const float d = Half(b), dmin = Half(b + 2);
  Bytes high = b + 16, q = b + 48;
  for (int j = 0; j < 8; j += 2, q += 32) {
    for (int part = 0; part < 2; ++part) {
      int scale = 0, min = 0;
      ScaleMinK4(b + 4, j + part, &scale, &min);
      const float dl = d * static_cast<float>(scale), ml = dmin * static_cast<float>(min);
      for (int i = 0; i < 32; ++i) {
        const int value = (q[i] >> (4 * part) & 15) | ((high[i] >> (j + part) & 1) << 4);
        *y++ = dl * static_cast<float>(value) - ml;
      }
    }
  }
}

// Q6_K: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, d.
void Q6K(Bytes b, float* y) {
  const float d = Half(b + 208);
  Bytes low = b, high = b + 128;
  const auto* scales = reinterpret_cast<const int8_t*>(b + 192);
  for (int half = 0; half < 2; ++half, y += 128, low += 64, high += 32, scales += 8) {
    for (int i = 0; i < 32; ++i) {
      const int s = i / 16;
      const int q1 = ((low[i] & 15) | (high[i] & 3) << 4) - 32;
      const int q2 = ((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4) - 32;
      const int q3 = ((low[i] >> 4) | (high[i] >> 4 & 3) << 4) - 32;
      const int q4 = ((low[i + 32] >> 4) | (high[i] >> 6) << 4) - 32;
      y[i] = d * static_cast<float>(scales[s]) * static_cast<float>(q1);
      y[i + 32] = d * static_cast<float>(scales[s + 2]) * static_cast<float>(q2);
      y[i + 64] = d * static_cast<float>(scales[s + 4]) * static_cast<float>(q3);
      y[i + 96] = d * static_cast<float>(scales[s + 6]) * static_cast<float>(q4);
    }
  }
}

// A power-of-two scale, then e2m1 codes (OCP MX 1.0). Values are doubled and scales halved, so that the
// smallest scale, 2^-128, is a float too. A scale byte of 255, the format's NaN, decodes to 2^128 as in ggml;
// packing rejects it (ReadGroupRows).
void Mxfp4(Bytes b, float* y) {
  static constexpr int kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const uint32_t e = b[0];
  const auto d = std::bit_cast<float>(e < 2 ? 0x00200000U << e : (e - 1) << 23);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(kDoubled[b[1 + i] & 15]) * d;
    y[i + 16] = static_cast<float>(kDoubled[b[1 + i] >> 4]) * d;
  }
}

using BlockFn = void (*)(Bytes, float*);

BlockFn FunctionOf(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
      return Q4_0;
    case DType::kQ4_1:
      return Q4_1;
    case DType::kQ5_0:
      return Q5_0;
    case DType::kQ5_1:
      return Q5_1;
    case DType::kQ8_0:
      return Q8_0;
    case DType::kQ2K:
      return Q2K;
    case DType::kQ3K:
      return Q3K;
    case DType::kQ4K:
      return Q4K;
    case DType::kQ5K:
      return Q5K;
    case DType::kQ6K:
      return Q6K;
    case DType::kMxfp4:
      return Mxfp4;
    default:
      return nullptr;
  }
}

}  // namespace

void ScaleMinK4(const uint8_t* packed, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *min = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
    *min = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
  }
}

void DequantizeBlocks(DType dtype, const std::byte* in, int64_t elements, float* out) {
  const auto* bytes = reinterpret_cast<Bytes>(in);
  if (dtype == DType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(elements) * 4);
  } else if (dtype == DType::kF16) {
    for (int64_t i = 0; i < elements; ++i) out[i] = Half(bytes + 2 * i);
  } else if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < elements; ++i) out[i] = tensor::ToFloat(tensor::BF16{U16(bytes + 2 * i)});
  } else {
    const BlockFn dequantize = FunctionOf(dtype);
    MOESAIC_CHECK(dequantize != nullptr);
    const tensor::BlockSize block = tensor::BlockOf(dtype);
    for (int64_t i = 0; i < elements; i += block.elements, bytes += block.bytes) dequantize(bytes, out + i);
  }
}

}  // namespace moesaic::checkpoint
