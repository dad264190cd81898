#include "kernels/ref/gemm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/fp8_codes-inl.h"
#include "tensor/fp8_format.h"
#include "tensor/packed.h"

namespace moesaic::kernels::ref {
namespace {

using tensor::BF16;

// Files of an instruction set cannot include the library that defines these.
static_assert(cpu::kFp8Inputs == tensor::kFp8Inputs && cpu::kFp8ScaleBytes == tensor::kFp8ScaleBytes &&
              cpu::kFp8UnitBytes == tensor::kFp8UnitBytes);

float Multiply(float a, float b) { return a * b; }
float Multiply(BF16 a, BF16 b) { return tensor::ToFloat(a) * tensor::ToFloat(b); }
int32_t Multiply(int8_t a, int8_t b) { return int32_t{a} * b; }

// Returns element (output, k) of packed weights: [n/16][k/g][16][g] with groups of 4 bytes.
template <typename T>
T Weight(const GemmTile& t, int output, int k) {
  constexpr int kGroup = 4 / static_cast<int>(sizeof(T));
  const auto* panel = reinterpret_cast<const T*>(t.w + output / 16 * t.panel_bytes);
  return panel[(k / kGroup * 16 + output % 16) * kGroup + k % kGroup];
}

// Sum is the accumulator type of products of T: f32, or i32 where the dot is exact.
template <typename T, typename Sum>
void Gemm(const GemmTile& t) {
  for (int row = 0; row < t.m; ++row) {
    const auto* a = reinterpret_cast<const T*>(t.a + row * t.a_stride);
    for (int output = 0; output < t.columns; ++output) {
      Sum sum = 0;
      for (int k = 0; k < t.k_padded; ++k) sum += Multiply(a[k], Weight<T>(t, output, k));
      auto value = static_cast<float>(sum);
      if constexpr (sizeof(T) == 1) value *= t.a_scales[row] * t.w_scales[output];
      if (t.bias != nullptr) value += t.bias[output];
      float& c = t.c[row * t.c_stride + output];
      c = t.accumulate ? c + value : value;
    }
  }
}

}  // namespace

float PrepareF32(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/, std::byte* out) {
  std::memcpy(out, x, k * sizeof(float));
  std::memset(out + k * sizeof(float), 0, (k_padded - k) * sizeof(float));
  return 0;
}

float PrepareBF16(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/, std::byte* out) {
  auto* to = reinterpret_cast<BF16*>(out);
  for (int i = 0; i < k; ++i) to[i] = tensor::ToBF16(x[i]);
  std::memset(to + k, 0, (k_padded - k) * sizeof(BF16));
  return 0;
}

float PrepareS8(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out) {
  // Bits of magnitudes are ordered like the magnitudes. Those of infinity and NaN are the largest.
  uint32_t bits = 0;
  for (int i = 0; i < k; ++i) bits = std::max(bits, std::bit_cast<uint32_t>(std::fabs(x[i])));
  const auto largest = std::bit_cast<float>(bits);
  const float scale = static_scale.is_set() && std::isfinite(largest) ? static_scale.scale : largest / 127;
  for (int i = 0; i < k_padded; ++i) {
    float q = 0;
    if (i < k && scale > 0) q = static_scale.is_set() ? x[i] * static_scale.inverse : x[i] / scale;
    q = std::min(std::max(-127.0F, q), 127.0F);  // NaN becomes -127
    out[i] = static_cast<std::byte>(static_cast<int8_t>(std::nearbyint(q)));
  }
  return scale;
}

void GemmF32(const GemmTile& tile) { Gemm<float, float>(tile); }
void GemmBF16(const GemmTile& tile) { Gemm<BF16, float>(tile); }
void GemmI8(const GemmTile& tile) { Gemm<int8_t, int32_t>(tile); }

void GemmF8G128(const GemmTile& t) {
  for (int output = 0; output < t.columns; ++output) {
    const int r = output % 16;
    for (int row = 0; row < t.m; ++row) {
      const auto* a = reinterpret_cast<const BF16*>(t.a + row * t.a_stride);
      float acc = 0;
      for (int u = 0; u < t.k_padded / tensor::kFp8Inputs; ++u) {
        const std::byte* unit = t.w + output / 16 * t.panel_bytes + u * tensor::kFp8UnitBytes;
        float sum = 0;
        for (int i = 0; i < tensor::kFp8Inputs; ++i) {
          const std::byte code = unit[tensor::kFp8ScaleBytes + 64 * (i / 4) + 16 * (r / 4) + 8 * (i % 4 / 2) +
                                      2 * (r % 4) + i % 2];
          sum += tensor::ToFloat(a[u * tensor::kFp8Inputs + i]) *
                 tensor::F8E4M3ToFloat(static_cast<uint8_t>(code));
        }
        acc += sum * reinterpret_cast<const float*>(unit)[r];
      }
      if (t.bias != nullptr) acc += t.bias[output];
      float& c = t.c[row * t.c_stride + output];
      c = t.accumulate ? c + acc : acc;
    }
  }
}

}  // namespace moesaic::kernels::ref
