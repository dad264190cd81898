#include "kernels/ref/key_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/key_summary_round-inl.h"

namespace moesaic::kernels::ref {
namespace {

float At(const KeySummaryTask& t, int key, int d) {
  const std::byte* row = t.keys + key * t.key_stride;
  if (t.kv_dtype == tensor::DType::kF32) return reinterpret_cast<const float*>(row)[d];
  if (t.kv_dtype == tensor::DType::kBF16) {
    return tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(row)[d]);
  }
  return static_cast<float>(reinterpret_cast<const int8_t*>(row)[d]) *
         (d < t.key_split ? t.key_scales : t.rest_scales)[key];
}

// Returns false if a key is not finite.
bool FindBox(const KeySummaryTask& t, int begin, int end, Box* box) {
  for (int d = begin; d < end; ++d) {
    box->low[d] = std::numeric_limits<float>::infinity();
    box->high[d] = -box->low[d];
    for (int key = 0; key < kBlockKeys; ++key) {
      const float x = At(t, key, d);
      if (!std::isfinite(x)) return false;
      box->low[d] = std::min(box->low[d], x);
      box->high[d] = std::max(box->high[d], x);
    }
  }
  return true;
}

float FindBall(const KeySummaryTask& t, int begin, int end, const float* centers) {
  float most = 0;
  for (int key = 0; key < kBlockKeys; ++key) {
    float sum = 0;
    for (int d = begin; d < end; ++d) sum += (At(t, key, d) - centers[d]) * (At(t, key, d) - centers[d]);
    most = std::max(most, sum);
  }
  return std::sqrt(most) * kNormSlack;
}

}  // namespace

void KeySummary(const KeySummaryTask& t) {
  auto* header = reinterpret_cast<KeySummaryHeader*>(t.summary);
  auto* centers = reinterpret_cast<int8_t*>(header + 1);
  auto* radii = reinterpret_cast<uint8_t*>(centers + t.key_dim);
  Box box;
  *header = {};
  const int ends[] = {0, t.key_split, t.key_dim};
  for (int part = 0; part < 2; ++part) {
    const int begin = ends[part], end = ends[part + 1];
    if (begin == end) continue;
    if (!FindBox(t, begin, end, &box) || !RoundBox(begin, end, part, &box, header, centers, radii)) {
      return InvalidateKeySummary(t.key_dim, header, centers, radii);
    }
    header->ball[part] = FindBall(t, begin, end, box.low);
  }
}

void KeySummaryEstimates(const kernels::KeySummaryEstimates& t) {
  const int ends[] = {0, t.key_split, t.key_dim};
  std::vector<float> q(t.key_dim);
  for (int row = 0; row < t.rows; ++row) {
    float norms[2] = {0, 0};
    for (int d = 0; d < t.key_dim; ++d) {
      q[d] = t.q[row * t.q_stride + d] * t.scale;
      norms[d < t.key_split ? 0 : 1] += q[d] * q[d];
    }
    for (int b = 0; b < t.count; ++b) {
      const auto* header = reinterpret_cast<const KeySummaryHeader*>(t.summaries[b]);
      const auto* centers = reinterpret_cast<const int8_t*>(header + 1);
      const auto* radii = reinterpret_cast<const uint8_t*>(centers + t.key_dim);
      float center = 0, spread = 0;
      for (int part = 0; part < 2; ++part) {
        float products = 0, reach = 0;
        for (int d = ends[part]; d < ends[part + 1]; ++d) {
          products += q[d] * static_cast<float>(centers[d]);
          reach += std::abs(q[d]) * static_cast<float>(radii[d]);
        }
        center += products * header->center_scale[part];
        spread += std::min(reach * header->radius_scale[part], std::sqrt(norms[part]) * header->ball[part]);
      }
      t.scores[(row / kScoreGroup * t.stride + b) * kScoreGroup + row % kScoreGroup] =
          center + t.share * spread;
    }
  }
}

void BlockShares(float* scores, int rows, int blocks, float* shares) {
  for (int b = 0; b < blocks; ++b) shares[b] = (scores[b * kScoreGroup] - scores[b * kScoreGroup]) * 0;
  for (int row = 0; row < rows; ++row) {
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int b = 0; b < blocks; ++b) {
      const float x = scores[b * kScoreGroup + row];
      most = x > most ? x : most;
    }
    for (int b = 0; b < blocks; ++b) {
      float& x = scores[b * kScoreGroup + row];
      x = x - most >= kMinPower ? std::exp(x - most) : 0;  // 0 for NaN
      sum += x;
    }
    for (int b = 0; b < blocks; ++b) shares[b] += sum > 0 ? scores[b * kScoreGroup + row] / sum : 0;
  }
}

namespace {

// Returns the sign of a dimension of a part's planes, which begin at `step` of the summary.
int SignAt(const std::byte* planes, int64_t step, int d, int key) {
  const std::byte* group = planes + (step + d / 64) * kSketchStepBytes + key / 16 * int64_t{128};
  const int quad = d % 64 / 4;
  const std::byte byte = group[quad / 8 * 64 + key % 16 * 4 + d % 4];
  return (std::to_integer<int>(byte) >> quad % 8 & 1) != 0 ? 1 : -1;
}

}  // namespace

void SketchScores(const kernels::SketchScores& t) {
  constexpr double kReach = 100 * 0.6931471805599453;  // the range of the other implementations' exponents
  for (int b = 0; b < t.count; ++b) {
    const std::byte* summary = t.summaries[b];
    const auto* header = reinterpret_cast<const KeySummaryHeader*>(summary);
    const auto* factors = reinterpret_cast<const uint8_t*>(summary + t.layout.factors);
    for (int row = 0; row < t.rows; ++row) {
      double sum = 0;
      for (int key = 0; key < kBlockKeys; ++key) {
        double estimate = 0;
        int64_t step = 0;
        const int8_t* q = t.q + row * t.q_stride;
        for (int part = 0; part < 2; ++part) {
          int product = 0;
          for (int d = 0; d < t.layout.width[part]; ++d) {
            product += q[d] * SignAt(summary + t.layout.planes, step, d, key);
          }
          if (t.layout.width[part] > 0) {
            estimate += double{t.q_scales[2 * row + part]} * product * header->sketch[part] *
                        factors[part * kBlockKeys + key];
          }
          q += t.layout.width[part];
          step += t.layout.width[part] / 64;
        }
        sum += std::exp(std::clamp(estimate, -kReach, kReach));
      }
      t.scores[(row / kScoreGroup * t.stride + b) * kScoreGroup + row % kScoreGroup] +=
          static_cast<float>(std::log(sum));
    }
  }
}

}  // namespace moesaic::kernels::ref
