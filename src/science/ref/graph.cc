#include "science/ref/graph.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "science/elements.h"

namespace moesaic::graph::ref {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t RowOf(const int32_t* rows, int32_t position) { return rows != nullptr ? rows[position] : position; }

float Combine(Op op, float u, float e) {
  switch (op) {
    case Op::kCopyU:
      return u;
    case Op::kAdd:
      return u + e;
    case Op::kSub:
      return u - e;
    case Op::kMul:
      return u * e;
    case Op::kDiv:
      return u / e;
  }
  return u;
}

float Message(const ReduceTask& t, int32_t p, int64_t col) {
  const float u = LoadElement(t.u, t.dtype, RowOf(t.u_rows, p) * t.u_stride + col);
  if (t.op == Op::kCopyU) return u;
  return Combine(t.op, u, LoadElement(t.e, t.dtype, RowOf(t.e_rows, p) * t.e_stride + col / t.e_group));
}

void StoreReduced(const ReduceTask& t, int32_t s, int64_t col, float value) {
  const int64_t at = s * t.out_stride + col;
  if (t.out_f32) {
    static_cast<float*>(t.out)[at] = value;
    return;
  }
  if (t.reduce == Reduce::kMean) value /= static_cast<float>(std::max(1, t.ptr[s + 1] - t.ptr[s]));
  value *= t.alpha;
  if (t.beta != 0) value += t.beta * LoadElement(t.out, t.dtype, at);
  StoreElement(t.out, t.dtype, at, value);
}

void ReduceExtreme(const ReduceTask& t, int32_t s, int64_t col) {
  const float sign = t.reduce == Reduce::kMin ? -1.0F : 1.0F;
  float best = 0;
  int32_t arg = t.arg_empty;
  for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) {
    const float x = Message(t, p, col);
    const bool larger = sign * x > sign * best || (std::isnan(x) && !std::isnan(best));
    if (p > t.ptr[s] && !larger) continue;
    best = x;
    arg = static_cast<int32_t>(RowOf(t.e_rows, p));
  }
  StoreReduced(t, s, col, best);
  if (t.arg != nullptr) t.arg[s * t.cols + col] = arg;
}

}  // namespace

void Reduce(const ReduceTask& t) {
  const bool extreme = t.reduce == graph::Reduce::kMax || t.reduce == graph::Reduce::kMin;
  for (int32_t s = t.first; s < t.last; ++s) {
    for (int64_t col = 0; col < t.cols; ++col) {
      if (extreme) {
        ReduceExtreme(t, s, col);
        continue;
      }
      float sum = 0;
      for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) {
        const bool counts =
            t.arg == nullptr || t.arg[RowOf(t.u_rows, p) * t.cols + col] == RowOf(t.e_rows, p);
        if (counts) sum += Message(t, p, col);
      }
      StoreReduced(t, s, col, sum);
    }
  }
}

void EdgeMap(const EdgeMapTask& t) {
  const tensor::DType out_type = t.out_f32 ? tensor::DType::kF32 : t.dtype;
  for (int32_t p = t.first; p < t.last; ++p) {
    const int64_t lhs = RowOf(t.lhs_rows, p), rhs = RowOf(t.rhs_rows, p), out = RowOf(t.out_rows, p);
    auto value = [&](int64_t col) {
      if (t.mask != nullptr && t.mask[lhs * t.cols + col] != out) return 0.0F;
      const float x = LoadElement(t.lhs, t.dtype, lhs * t.lhs_stride + col);
      if (t.op == Op::kCopyU) return x;
      return Combine(t.op, x, LoadElement(t.rhs, t.dtype, rhs * t.rhs_stride + col / t.rhs_group));
    };
    if (t.sum_group == 0) {
      for (int64_t col = 0; col < t.cols; ++col)
        StoreElement(t.out, out_type, out * t.out_stride + col, t.alpha * value(col));
      continue;
    }
    for (int64_t j = 0; j * t.sum_group < t.cols; ++j) {
      float sum = 0;
      for (int64_t col = j * t.sum_group; col < (j + 1) * t.sum_group; ++col) sum += value(col);
      StoreElement(t.out, out_type, out * t.out_stride + j, t.alpha * sum);
    }
  }
}

void Softmax(const SoftmaxTask& t) {
  for (int32_t s = t.first; s < t.last; ++s) {
    for (int64_t col = 0; col < t.cols; ++col) {
      auto x = [&](int32_t p) { return LoadElement(t.x, t.dtype, RowOf(t.rows, p) * t.x_stride + col); };
      auto grad = [&](int32_t p) {
        return LoadElement(t.grad, t.dtype, RowOf(t.rows, p) * t.grad_stride + col);
      };
      auto store = [&](int32_t p, float value) {
        StoreElement(t.out, t.dtype, RowOf(t.rows, p) * t.out_stride + col, value);
      };
      float dot = 0, max = -kInfinity, sum = 0;
      for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) {
        if (t.grad != nullptr) dot += x(p) * grad(p);
        max = std::max(max, x(p));
      }
      if (t.grad != nullptr) {
        for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) store(p, x(p) * (grad(p) - dot));
        continue;
      }
      if (max == -kInfinity) max = 0;  // masked: weights are exp(-inf) = 0
      for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) sum += std::exp(x(p) - max);
      for (int32_t p = t.ptr[s]; p < t.ptr[s + 1]; ++p) store(p, sum == 0 ? 0 : std::exp(x(p) - max) / sum);
    }
  }
}

void EdgeAttention(const EdgeAttentionTask& t) {
  std::vector<float> scores;
  for (int32_t node = t.first; node < t.last; ++node) {
    for (int head = 0; head < t.heads; ++head) {
      scores.clear();
      float max = -kInfinity, sum = 0;
      for (int32_t p = t.ptr[node]; p < t.ptr[node + 1]; ++p) {
        float score = 0;
        for (int i = 0; i < t.dim; ++i) {
          score += LoadElement(t.q, t.dtype, node * t.q_stride + int64_t{head} * t.dim + i) *
                   LoadElement(t.k, t.dtype, RowOf(t.k_rows, p) * t.k_stride + int64_t{head} * t.dim + i);
        }
        score *= t.scale;
        if (t.bias != nullptr)
          score += LoadElement(t.bias, t.dtype, RowOf(t.e_rows, p) * t.bias_stride + head);
        scores.push_back(score);
        max = std::max(max, score);
      }
      if (max == -kInfinity) max = 0;  // masked: weights are exp(-inf) = 0
      for (float& score : scores) sum += score = std::exp(score - max);
      for (int d = 0; d < t.v_dim; ++d) {
        float value = 0;
        for (size_t i = 0; i < scores.size(); ++i) {
          const int64_t row = RowOf(t.v_rows, t.ptr[node] + static_cast<int32_t>(i));
          value += scores[i] * LoadElement(t.v, t.dtype, row * t.v_stride + int64_t{head} * t.v_dim + d);
        }
        StoreElement(t.out, t.dtype, node * t.out_stride + int64_t{head} * t.v_dim + d,
                     sum == 0 ? 0.0F : value / sum);
      }
      if (t.log_sum != nullptr) {
        t.log_sum[int64_t{node} * t.heads + head] = sum == 0 ? -kInfinity : max + std::log(sum);
      }
    }
  }
}

}  // namespace moesaic::graph::ref
