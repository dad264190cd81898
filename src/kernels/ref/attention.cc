#include "kernels/ref/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moesaic::kernels::ref {
namespace {

float At(const std::byte* row, tensor::DType dtype, int i) {
  if (dtype == tensor::DType::kF32) return reinterpret_cast<const float*>(row)[i];
  if (dtype == tensor::DType::kI8) return reinterpret_cast<const int8_t*>(row)[i];
  return tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(row)[i]);
}

// Returns the scale of key j, `scales` bytes after its run.
float Scale(const AttentionTile& t, int64_t scales, int j) {
  if (t.kv_dtype != tensor::DType::kI8) return 1;
  return reinterpret_cast<const float*>(t.runs[j / kBlockKeys] + scales)[j % kBlockKeys];
}

float Score(const AttentionTile& t, const float* q, int j) {
  const std::byte* key = t.runs[j / kBlockKeys] + j % kBlockKeys * t.key_stride;
  float dot = 0;
  for (int d = 0; d < t.key_dim; ++d) {
    dot += q[d] * (At(key, t.kv_dtype, d) * Scale(t, d < t.key_split ? t.key_scales : t.rest_scales, j));
  }
  return dot;
}

// Computes one query row over its `visible` keys.
void Row(const AttentionTile& t, int row, int visible) {
  float score[kAttentionRuns * kBlockKeys];
  const float before = t.resume ? t.max[row] : -std::numeric_limits<float>::infinity();
  float max = before;
  for (int j = 0; j < visible; ++j) max = std::max(max, score[j] = Score(t, t.q + row * t.q_stride, j));
  float* acc = t.acc + row * t.acc_stride;
  const float keep = before == max ? 1 : std::exp(before - max);
  float sum = t.resume ? t.sum[row] * keep : 0;
  for (int d = 0; d < t.value_dim; ++d) acc[d] = t.resume ? acc[d] * keep : 0;
  for (int j = 0; j < visible; ++j) {
    const float p = std::exp(score[j] - max);
    sum += p;
    const float weight = p * Scale(t, t.value_scales, j);
    const std::byte* value = t.runs[j / kBlockKeys] + t.value_offset + j % kBlockKeys * t.value_stride;
    for (int d = 0; d < t.value_dim; ++d) acc[d] += weight * At(value, t.kv_dtype, d);
  }
  t.max[row] = max;
  t.sum[row] = sum;
}

}  // namespace

void Attention(const AttentionTile& tile) {
  for (int row = 0; row < tile.rows; ++row) Row(tile, row, tile.visible[row]);
}

}  // namespace moesaic::kernels::ref
