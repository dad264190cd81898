#include "kernels/sketch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace moesaic::kernels {
namespace {

constexpr int kPartialSums = 16;  // partial sums, which compilers keep in one register
// With two planes, a sign counts 3 if the magnitude exceeds the mean of the magnitudes times this, otherwise
// 1. The optimum for normally distributed numbers is 0.98 of their deviation, which is 1.23 times that mean.
constexpr float kLarge = 1.23F;

// Signs of the two rounds of a rotation. Any numbers unrelated to the keys are suitable; existing sketches
// depend on them (kKeySummaryVersion).
constexpr auto kSigns = [] {
  std::array<std::array<float, kMaxKeySummaryDim>, 2> signs = {};
  uint32_t state = 0x9e3779b9;
  for (auto& round : signs) {
    for (float& sign : round) {
      state ^= state << 13U;
      state ^= state >> 17U;
      state ^= state << 5U;
      sign = (state >> 16U & 1U) != 0 ? 1.0F : -1.0F;
    }
  }
  return signs;
}();

struct Buffers {
  alignas(64) float x[kMaxKeySummaryDim];
  alignas(64) float spare[kMaxKeySummaryDim];
};

// A Hadamard transform of n = 2^i numbers, scaled to preserve lengths, with vector-friendly strides: each
// pass stores the sums of neighbours in the first half and their differences in the second.
void Hadamard(float* x, float* spare, int n) {
  for (int step = 1; step < n; step *= 2) {
    for (int i = 0; i < n / 2; ++i) {
      spare[i] = x[2 * i] + x[2 * i + 1];
      spare[i + n / 2] = x[2 * i] - x[2 * i + 1];
    }
    std::swap(x, spare);
  }
  // After an odd number of passes the numbers are in `spare`.
  float* const at = __builtin_ctz(static_cast<unsigned>(n)) % 2 == 0 ? x : spare;
  const float scale = 1 / std::sqrt(static_cast<float>(n));
  for (int i = 0; i < n; ++i) at[i] = x[i] * scale;
}

// Rotates b.x [dim], dim a multiple of 8, in chunks of powers of two: the largest first, and in the second
// round last, so that all dimensions mix.
void Rotate(int dim, Buffers* b) {
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < dim; ++i) b->x[i] *= kSigns[round][i];
    int from = 0;
    const auto chunk = [&](int size) {
      if ((dim & size) == 0) return;
      Hadamard(b->x + from, b->spare, size);
      from += size;
    };
    if (round == 0) {
      for (int size = kMaxKeySummaryDim; size >= 8; size /= 2) chunk(size);
    } else {
      for (int size = 8; size <= kMaxKeySummaryDim; size *= 2) chunk(size);
    }
  }
}

float SumOf(const float* x, int count) {
  float sums[kPartialSums] = {};
  for (int i = 0; i < count; i += 8) {
    for (int j = 0; j < 8; ++j) sums[i % kPartialSums + j] += x[i + j];
  }
  float sum = 0;
  for (const float each : sums) sum += each;
  return sum;
}

// Loads dimensions [begin, begin + dim) of a key minus the center.
void LoadKey(const KeySummaryTask& t, int key, int begin, int dim, int part, float* x) {
  const auto* header = reinterpret_cast<const KeySummaryHeader*>(t.summary);
  const auto* centers = reinterpret_cast<const int8_t*>(header + 1) + begin;
  const std::byte* from = t.keys + key * t.key_stride + tensor::BytesOf(t.kv_dtype, begin);
  if (t.kv_dtype == tensor::DType::kF32) {
    std::memcpy(x, from, dim * sizeof(float));
  } else if (t.kv_dtype == tensor::DType::kBF16) {
    for (int d = 0; d < dim; ++d) x[d] = tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(from)[d]);
  } else {
    const float scale = (part == 0 ? t.key_scales : t.rest_scales)[key];
    for (int d = 0; d < dim; ++d) x[d] = static_cast<float>(reinterpret_cast<const int8_t*>(from)[d]) * scale;
  }
  const float scale = header->center_scale[part];
  for (int d = 0; d < dim; ++d) x[d] -= static_cast<float>(centers[d]) * scale;
}

void SetSign(std::byte* planes, int d, int key) {
  const int quad = d % 64 / 4;
  std::byte* group = planes + d / 64 * kSketchStepBytes + key / 16 * int64_t{128};
  group[quad / 8 * 64 + key % 16 * 4 + d % 4] |= std::byte{1} << (quad % 8);
}

// Sets a key's signs and returns the factor for which its product with itself is exact.
float SketchKey(int dim, int key, Buffers* b, std::byte* planes) {
  float* const x = b->x;
  float* const other = b->spare;
  for (int d = 0; d < dim; ++d) other[d] = x[d] * x[d];
  const float squares = SumOf(other, dim);
  Rotate(dim, b);
  for (int d = 0; d < dim; ++d) other[d] = std::abs(x[d]);
  float product = SumOf(other, dim);  // product of the rotated difference with its signs
  for (int d = 0; d < dim; ++d) {
    if (x[d] >= 0) SetSign(planes, d, key);
  }
  if (dim <= 64) {
    const float large = kLarge * product / static_cast<float>(dim);
    for (int d = 0; d < dim; ++d) {
      if ((x[d] >= 0) == (other[d] > large)) SetSign(planes, 64 + d, key);
      other[d] *= other[d] > large ? 3.0F : 1.0F;
    }
    product = SumOf(other, dim);
  }
  return product > 0 ? squares / product : 0;
}

}  // namespace

void MakeSketches(const KeySummaryTask& t) {
  const SketchLayout layout = SketchLayoutOf(t.key_dim, t.key_split);
  auto* header = reinterpret_cast<KeySummaryHeader*>(t.summary);
  std::memset(t.summary + layout.factors, 0, layout.bytes - layout.factors);
  header->sketch[0] = header->sketch[1] = 0;
  if (std::isnan(header->center_scale[0]) || std::isnan(header->center_scale[1])) return;
  Buffers buffers;
  std::byte* planes = t.summary + layout.planes;
  const int ends[] = {0, t.key_split, t.key_dim};
  for (int part = 0; part < 2; ++part) {
    const int begin = ends[part], dim = ends[part + 1] - begin;
    if (dim == 0) continue;
    float factors[kBlockKeys], most = 0;
    for (int key = 0; key < kBlockKeys; ++key) {
      LoadKey(t, key, begin, dim, part, buffers.x);
      factors[key] = SketchKey(dim, key, &buffers, planes);
      most = std::max(most, factors[key]);
    }
    planes += layout.width[part] / 64 * kSketchStepBytes;
    if (!(most > 0)) continue;
    header->sketch[part] = most / 255;
    auto* to = reinterpret_cast<uint8_t*>(t.summary + layout.factors) + part * kBlockKeys;
    for (int key = 0; key < kBlockKeys; ++key) {
      to[key] = static_cast<uint8_t>(std::min(factors[key] / most * 255 + 0.5F, 255.0F));
    }
  }
}

void SketchQuery(const float* q, int key_dim, int key_split, int8_t* out, float* scales, int32_t* sums) {
  const SketchLayout layout = SketchLayoutOf(key_dim, key_split);
  Buffers buffers;
  const int ends[] = {0, key_split, key_dim};
  for (int part = 0; part < 2; ++part) {
    const int begin = ends[part], dim = ends[part + 1] - begin, width = layout.width[part];
    scales[part] = 0;
    sums[part] = 0;
    std::memset(out, 0, width);
    if (dim == 0) continue;
    std::memcpy(buffers.x, q + begin, dim * sizeof(float));
    Rotate(dim, &buffers);
    float most = 0, wrong = 0;
    for (int d = 0; d < dim; ++d) {
      most = std::max(most, std::abs(buffers.x[d]));
      wrong += buffers.x[d] - buffers.x[d];
    }
    if (wrong == 0 && most > 1e-30F) {
      const int planes = dim <= 64 ? 2 : 1;
      const float range = planes == 2 ? 63 : 127, inverse = range / most;
      scales[part] = most / range;
      for (int d = 0; d < dim; ++d) {
        const auto rounded = static_cast<int>(std::lrint(buffers.x[d] * inverse));
        out[d] = static_cast<int8_t>(rounded * planes);
        if (planes == 2) out[64 + d] = static_cast<int8_t>(rounded);
        sums[part] += rounded * (planes == 2 ? 3 : 1);
      }
    }
    out += width;
  }
}

}  // namespace moesaic::kernels
