#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_formats-inl.h"
#include "tensor/dtype.h"

namespace moesaic::kernels::ref {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): the formats' constants

int Ceil(int value, int unit) { return (value + unit - 1) / unit; }

template <typename Format>
float Prepare(const float* x, int k, int k_padded, std::byte* out) {
  auto* codes = reinterpret_cast<int8_t*>(out);
  auto* scales = reinterpret_cast<float*>(out + k_padded);
  auto* corrections = reinterpret_cast<int32_t*>(out + k_padded + k_padded / 8);
  for (int first = 0; first < k_padded; first += kActivationGroup) {
    float largest = 0;
    for (int i = first; i < std::min(first + kActivationGroup, k); ++i) {
      largest = std::max(largest, std::fabs(x[i]));
    }
    const float scale = largest / 127;
    scales[first / kActivationGroup] = scale;
    for (int i = first; i < first + kActivationGroup; ++i) {
      const float q = i < k && scale > 0 ? std::min(std::max(-127.0F, x[i] / scale), 127.0F) : 0;  // NaN: -127
      codes[i] = static_cast<int8_t>(std::nearbyint(q));
    }
  }
  for (int group = 0; group < Ceil(k_padded, Format::kGroup); ++group) {
    int32_t sum = 0;
    for (int i = 0; i < Format::kGroup; ++i) sum += codes[group * Format::kGroup + i];
    corrections[group] = -Format::kZero * sum;
  }
  return 0;
}

// The biased code of input `i` of a unit, as the kernels multiply it.
template <typename Format>
int CodeAt(const std::byte* unit, int output, int i) {
  const std::byte* codes = unit + kUnitScaleBytes;
  if constexpr (Format::kBits == 8) return static_cast<int>(codes[64 * (i / 4) + 4 * output + i % 4]);
  const int both = static_cast<int>(codes[64 * (i / 8) + 4 * output + i % 4]);
  const int code = both >> (i % 8 < 4 ? 0 : 4) & 15;
  return Format::kTable ? kE2M1Codes[code] : code;
}

// As the kernels take it: of an e4m3, 2^-8 of its value.
template <typename Format>
float ScaleAt(const std::byte* unit, int output, int group) {
  if constexpr (Format::kE4M3) {
    return tensor::F8E4M3ToFloat(static_cast<uint8_t>(unit[16 * group + output])) / 256;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, unit + 32 * group + 2 * output, sizeof bits);
  return tensor::HalfToFloat(bits);
}

template <typename Format>
void Gemm(const GemmTile& t) {
  constexpr int kGroups = kUnitInputs / Format::kGroup;
  for (int row = 0; row < t.m; ++row) {
    const std::byte* a = t.a + row * t.a_stride;
    const auto* x = reinterpret_cast<const int8_t*>(a);
    const auto* scales = reinterpret_cast<const float*>(a + t.k_padded);
    for (int output = 0; output < t.columns; ++output) {
      const std::byte* panel = t.w + output / 16 * t.panel_bytes;
      float acc = 0;
      for (int g = 0; g < t.k_padded / Format::kGroup; ++g) {
        const std::byte* unit = panel + int64_t{g / kGroups} * kUnitBytes<Format>;
        int32_t dot = 0;
        for (int i = 0; i < Format::kGroup; ++i) {
          const int code = CodeAt<Format>(unit, output % 16, g % kGroups * Format::kGroup + i);
          dot += (code - Format::kZero) * x[g * Format::kGroup + i];
        }
        const float scaled = static_cast<float>(dot) * scales[g * Format::kGroup / kActivationGroup];
        acc = std::fma(scaled, ScaleAt<Format>(unit, output % 16, g % kGroups), acc);
      }
      float value = acc * (Format::kUnit * t.w_scales[output]);
      if (t.bias != nullptr) value += t.bias[output];
      float& c = t.c[row * t.c_stride + output];
      c = t.accumulate ? c + value : value;
    }
  }
}

}  // namespace

float PrepareI8G32(const float* x, int k, int k_padded, float /*static_scale*/, std::byte* out) {
  return Prepare<I8G32>(x, k, k_padded, out);
}
float PrepareI4G32(const float* x, int k, int k_padded, float /*static_scale*/, std::byte* out) {
  return Prepare<I4G32>(x, k, k_padded, out);
}
float PrepareMxfp4(const float* x, int k, int k_padded, float /*static_scale*/, std::byte* out) {
  return Prepare<Mxfp4>(x, k, k_padded, out);
}
float PrepareNvfp4(const float* x, int k, int k_padded, float /*static_scale*/, std::byte* out) {
  return Prepare<Nvfp4>(x, k, k_padded, out);
}

void GemmI8G32(const GemmTile& tile) { Gemm<I8G32>(tile); }
void GemmI4G32(const GemmTile& tile) { Gemm<I4G32>(tile); }
void GemmMxfp4(const GemmTile& tile) { Gemm<Mxfp4>(tile); }
void GemmNvfp4(const GemmTile& tile) { Gemm<Nvfp4>(tile); }

}  // namespace moesaic::kernels::ref
