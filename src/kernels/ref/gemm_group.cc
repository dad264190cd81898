#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/round.h"
#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_formats-inl.h"
#include "tensor/dtype.h"
#include "tensor/group_format.h"

namespace moesaic::kernels::ref {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): the formats' constants

// Files of an instruction set cannot include the library that defines these.
static_assert(kUnitInputs == tensor::kUnitInputs && kUnitScaleBytes == tensor::kUnitScaleBytes &&
              kSuperUnits == tensor::kSuperUnits && kSuperBytes == tensor::kSuperBytes);

template <typename Format>
float Prepare(const float* x, int k, int k_padded, std::byte* out) {
  auto* codes = reinterpret_cast<int8_t*>(out);
  auto* scales = reinterpret_cast<float*>(out + k_padded);
  std::byte* corrections = out + k_padded + k_padded / 8;
  for (int first = 0; first < k_padded; first += kActivationGroup) {
    // Bits of magnitudes are ordered like the magnitudes. Those of infinity and NaN are the largest.
    uint32_t bits = 0;
    for (int i = first; i < std::min(first + kActivationGroup, k); ++i) {
      bits = std::max(bits, std::bit_cast<uint32_t>(std::fabs(x[i])));
    }
    const float scale = std::bit_cast<float>(bits) / 127;
    scales[first / kActivationGroup] = scale;
    for (int i = first; i < first + kActivationGroup; ++i) {
      const float q =
          i < k && scale > 0 ? std::min(std::max(-127.0F, x[i] / scale), 127.0F) : 0;  // NaN becomes -127
      codes[i] = static_cast<int8_t>(std::nearbyint(q));
    }
  }
  for (int group = 0; group < base::CeilDiv(k_padded, Format::kGroup); ++group) {
    int32_t sum = 0;
    for (int i = 0; i < Format::kGroup; ++i) sum += codes[group * Format::kGroup + i];
    StoreCorrection<Format>(sum, scales[group * Format::kGroup / kActivationGroup], group, corrections);
  }
  return 0;
}

// Returns the biased code of input `i` of a unit, as the kernels multiply it.
template <typename Format>
int CodeAt(const std::byte* unit, int output, int i) {
  const std::byte* codes = unit + kUnitScaleBytes;
  if constexpr (Format::kBits == 8) return static_cast<int>(codes[64 * (i / 4) + 4 * output + i % 4]);
  const int both = static_cast<int>(codes[64 * (i / 8) + 4 * output + i % 4]);
  const int code = both >> (i % 8 < 4 ? 0 : 4) & 15;
  if constexpr (Format::kBits == 6) {
    const int high = static_cast<int>(codes[512 + 64 * (i / 16) + 4 * output + i % 4]);
    return code | (high >> (i % 16 / 4 * 2) & 3) << 4;
  }
  return Format::kTable ? kE2M1Codes[code] : code;
}

float HalfAt(const std::byte* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return tensor::HalfToFloat(bits);
}

// Returns the scale as the kernels use it: for e4m3, 2^-8 of its value.
template <typename Format>
float ScaleAt(const std::byte* panel, int unit, int output, int group) {
  const std::byte* scales = UnitAt<Format>(panel, unit);
  if constexpr (Format::kScale == GroupScale::kE4M3) {
    return tensor::F8E4M3ToFloat(static_cast<uint8_t>(scales[16 * group + output])) / 256;
  } else if constexpr (kHasSuper<Format>) {
    const std::byte scale = scales[16 * group + output];
    const float value =
        Format::kMinimum ? static_cast<float>(scale) : static_cast<float>(static_cast<int8_t>(scale));
    return value * HalfAt(SuperAt<Format>(panel, unit) + 2 * output);
  } else {
    return HalfAt(scales + 32 * group + 2 * output);
  }
}

template <typename Format>
float MinimumAt(const std::byte* panel, int unit, int output, int group) {
  const std::byte minimum = UnitAt<Format>(panel, unit)[32 + 16 * group + output];
  return static_cast<float>(minimum) * HalfAt(SuperAt<Format>(panel, unit) + 32 + 2 * output);
}

template <typename Format>
void Gemm(const GemmTile& t) {
  constexpr int kGroups = kUnitInputs / Format::kGroup;
  for (int row = 0; row < t.m; ++row) {
    const std::byte* a = t.a + row * t.a_stride;
    const auto* x = reinterpret_cast<const int8_t*>(a);
    const auto* scales = reinterpret_cast<const float*>(a + t.k_padded);
    const auto* corrections = reinterpret_cast<const float*>(a + t.k_padded + t.k_padded / 8);
    for (int output = 0; output < t.columns; ++output) {
      const std::byte* panel = t.w + output / 16 * t.panel_bytes;
      const int r = output % 16;
      float acc = 0;
      for (int g = 0; g < t.k_padded / Format::kGroup; ++g) {
        const int unit = g / kGroups, in_unit = g % kGroups;
        int32_t dot = 0;
        for (int i = 0; i < Format::kGroup; ++i) {
          const int code = CodeAt<Format>(UnitAt<Format>(panel, unit), r, in_unit * Format::kGroup + i);
          dot += (code - Format::kZero) * x[g * Format::kGroup + i];
        }
        const float scaled = static_cast<float>(dot) * scales[g * Format::kGroup / kActivationGroup];
        acc = std::fma(scaled, ScaleAt<Format>(panel, unit, r, in_unit), acc);
        if constexpr (Format::kMinimum) {
          acc = std::fma(-corrections[g], MinimumAt<Format>(panel, unit, r, in_unit), acc);
        }
      }
      float value = acc * (Format::kUnit * t.w_scales[output]);
      if (t.bias != nullptr) value += t.bias[output];
      float& c = t.c[row * t.c_stride + output];
      c = t.accumulate ? c + value : value;
    }
  }
}

}  // namespace

float PrepareI8G32(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                   std::byte* out) {
  return Prepare<I8G32>(x, k, k_padded, out);
}
float PrepareI4G32(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                   std::byte* out) {
  return Prepare<I4G32>(x, k, k_padded, out);
}
float PrepareMxfp4(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                   std::byte* out) {
  return Prepare<Mxfp4>(x, k, k_padded, out);
}
float PrepareNvfp4(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                   std::byte* out) {
  return Prepare<Nvfp4>(x, k, k_padded, out);
}
float PrepareQ4K(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/, std::byte* out) {
  return Prepare<Q4K>(x, k, k_padded, out);
}
float PrepareQ6K(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/, std::byte* out) {
  return Prepare<Q6K>(x, k, k_padded, out);
}

void GemmI8G32(const GemmTile& tile) { Gemm<I8G32>(tile); }
void GemmI4G32(const GemmTile& tile) { Gemm<I4G32>(tile); }
void GemmMxfp4(const GemmTile& tile) { Gemm<Mxfp4>(tile); }
void GemmNvfp4(const GemmTile& tile) { Gemm<Nvfp4>(tile); }
void GemmQ4K(const GemmTile& tile) { Gemm<Q4K>(tile); }
void GemmQ6K(const GemmTile& tile) { Gemm<Q6K>(tile); }

}  // namespace moesaic::kernels::ref
