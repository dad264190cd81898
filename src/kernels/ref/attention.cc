#include "kernels/ref/attention.h"

#include <algorithm>
#include <cmath>

namespace moesaic::kernels::ref {
namespace {

constexpr int kMaxKeys = 64;

float At(const std::byte* row, tensor::DType dtype, int i) {
  if (dtype == tensor::DType::kF32) return reinterpret_cast<const float*>(row)[i];
  if (dtype == tensor::DType::kI8) return reinterpret_cast<const int8_t*>(row)[i];
  return tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(row)[i]);
}

float KeyScale(const AttentionTile& t, int key, int d) {
  if (t.kv_dtype != tensor::DType::kI8) return 1;
  return d < t.key_split ? t.key_scales[key] : t.rest_scales[key];
}

float ValueScale(const AttentionTile& t, int key) {
  return t.kv_dtype == tensor::DType::kI8 ? t.value_scales[key] : 1;
}

// One query row against the `visible` keys that it sees.
void Row(const AttentionTile& t, int row, int visible) {
  const float* q = t.q + row * t.q_stride;
  float* acc = t.acc + row * t.acc_stride;
  float score[kMaxKeys];
  float largest = t.max[row];
  for (int j = 0; j < visible; ++j) {
    float dot = 0;
    for (int d = 0; d < t.key_dim; ++d) {
      dot += q[d] * (At(t.keys + j * t.key_stride, t.kv_dtype, d) * KeyScale(t, j, d));
    }
    score[j] = dot;
    largest = std::max(largest, dot);
  }
  const float keep =
      std::exp(t.max[row] - largest);  // what was added up so far is relative to the old maximum
  t.max[row] = largest;
  t.sum[row] *= keep;
  for (int d = 0; d < t.value_dim; ++d) acc[d] *= keep;
  for (int j = 0; j < visible; ++j) {
    const float p = std::exp(score[j] - largest);
    t.sum[row] += p;
    const float weight = p * ValueScale(t, j);
    for (int d = 0; d < t.value_dim; ++d) {
      acc[d] += weight * At(t.values + j * t.value_stride, t.kv_dtype, d);
    }
  }
}

}  // namespace

void Attention(const AttentionTile& tile) {
  for (int row = 0; row < tile.rows; ++row) {
    if (tile.visible[row] > 0) Row(tile, row, tile.visible[row]);
  }
}

}  // namespace moesaic::kernels::ref
