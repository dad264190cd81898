#include "science/dense_gradient.h"

#include <algorithm>

#include "base/round.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kGradientRows = 48;  // rows of a product: a multiple of the kernel's 6

}  // namespace

StatusOr<float*> GradientScope::Get(const std::string& name, int64_t size) const {
  const auto found = gradients_->find(prefix_ + name);
  if (found == gradients_->end()) return nullptr;
  if (static_cast<int64_t>(found->second.size()) != size) {
    return InvalidArgument("the gradient of \"{}{}\" must have {} elements, but has {}", prefix_, name, size,
                           found->second.size());
  }
  return found->second.data();
}

GradientMap GradientsUnder(const GradientMap& gradients, const std::string& name) {
  const std::string prefix = name + ".";
  GradientMap found;
  for (auto at = gradients.lower_bound(prefix); at != gradients.end() && at->first.starts_with(prefix); ++at)
    found[at->first.substr(prefix.size())] = at->second;
  return found;
}

StatusOr<DenseGradients> DenseGradients::Find(const GradientScope& scope, const std::string& name,
                                              const Dense& dense) {
  DenseGradients out;
  ASSIGN_OR_RETURN(out.weight, scope.Get(name + ".weight", int64_t{dense.n()} * dense.k()));
  ASSIGN_OR_RETURN(out.bias, scope.Get(name + ".bias", dense.n()));
  return out;
}

StatusOr<NormGradients> NormGradients::Find(const GradientScope& scope, const std::string& name,
                                            const Norm& norm) {
  NormGradients out;
  const auto n = static_cast<int64_t>(norm.gamma.size());
  ASSIGN_OR_RETURN(out.gamma, scope.Get(name + ".weight", n));
  ASSIGN_OR_RETURN(out.beta, scope.Get(name + ".bias", n));
  return out;
}

DenseBackward::DenseBackward(const Dense& dense)
    : n_(dense.n()), k_(dense.k()), weight_(int64_t{dense.n()} * dense.k()) {
  for (int row = 0; row < n_; ++row)
    tensor::UnpackRow(dense.matrix(), row, {weight_.data() + int64_t{row} * k_, static_cast<size_t>(k_)});
}

void DenseBackward::Inputs(const graph::Context& ctx, const float* y_grad, int64_t y_stride, int64_t rows,
                           float* x_grad, int64_t x_stride, bool accumulate) const {
  ForRows(ctx, rows, 2 * kGradientRows, [&](int64_t first, int64_t last) {
    ctx.graph->rows.matmul({.a = y_grad + first * y_stride,
                            .b = weight_.data(),
                            .c = x_grad + first * x_stride,
                            .a_stride = y_stride,
                            .b_stride = k_,
                            .c_stride = x_stride,
                            .m = last - first,
                            .n = k_,
                            .k = n_,
                            .accumulate = accumulate});
  });
}

void ActivationBackward(const graph::Context& ctx, const float* x, int64_t count,
                        graph::Activation activation, float* grad) {
  ForRows(ctx, count, 1 << 15, [&](int64_t first, int64_t last) {
    ctx.graph->rows.activate_gradient(x + first, grad + first, static_cast<int>(last - first), activation,
                                      grad + first);
  });
}

void AddTo(const graph::Context& ctx, const float* from, int64_t count, float* out) {
  constexpr int64_t kElements = 1 << 15;
  if (out == nullptr) return;
  ForRows(ctx, count, kElements, [&](int64_t first, int64_t last) {
    ctx.exec.kernels->axpy(1, from + first, static_cast<int>(last - first), out + first);
  });
}

void AddColumnSums(const graph::Context& ctx, const float* x, int64_t x_stride, int64_t rows, int n,
                   const float* scale, float* out) {
  constexpr int64_t kColumns = 64;
  ForRows(ctx, n, kColumns, [&](int64_t first, int64_t last) {
    for (int64_t r = 0; r < rows; ++r)
      ctx.exec.kernels->axpy(scale == nullptr ? 1 : scale[r], x + r * x_stride + first,
                             static_cast<int>(last - first), out + first);
  });
}

void AddWeightGradients(const graph::Context& ctx, const float* y_grad, int64_t y_stride, int n,
                        const float* x, int64_t x_stride, int k, int64_t rows, const DenseGradients& out) {
  if (out.bias != nullptr) AddColumnSums(ctx, y_grad, y_stride, rows, n, nullptr, out.bias);
  if (out.weight == nullptr || rows == 0) return;
  // A task owns outputs, i.e. rows of the gradient: its columns of y_grad become rows first.
  const graph::ScratchScope scope(ctx);
  std::vector<float*> transposed;
  for (int w = 0; w < ctx.exec.pool->size(); ++w)
    transposed.push_back(ctx.exec.scratch->Take<float>(kGradientRows * rows).data());
  ctx.exec.pool->Run(base::CeilDiv(n, kGradientRows), [&](int64_t task, int worker) {
    const int64_t first = task * kGradientRows, count = std::min<int64_t>(kGradientRows, n - first);
    float* a = transposed[worker];
    ctx.graph->rows.transpose(y_grad + first, y_stride, rows, count, a, rows);
    ctx.graph->rows.matmul({.a = a,
                            .b = x,
                            .c = out.weight + first * k,
                            .a_stride = rows,
                            .b_stride = x_stride,
                            .c_stride = k,
                            .m = count,
                            .n = k,
                            .k = rows,
                            .accumulate = true});
  });
}

void NormBackward(const graph::Context& ctx, const Norm& norm, const float* x, const float* y_grad,
                  int64_t rows, float* x_grad, const NormGradients& out) {
  const graph::ScratchScope scope(ctx);
  const auto n = static_cast<int64_t>(norm.gamma.size());
  // Partial sums of gamma's and beta's gradients belong to a fixed number of rows and are added in order.
  constexpr int64_t kParts = 64;
  const int64_t part_rows = std::max<int64_t>(64, base::CeilDiv(rows, kParts));
  const int64_t parts = base::CeilDiv(rows, part_rows);
  const bool sums = out.gamma != nullptr || out.beta != nullptr;
  if (x_grad == nullptr && !sums) return;
  // The kernel adds to a row for x in any case.
  const int64_t unused_size = x_grad == nullptr ? ctx.exec.pool->size() * n : 0;
  float* unused = ctx.exec.scratch->Take<float>(unused_size).data();
  std::fill_n(unused, unused_size, 0.0F);
  float* partial = ctx.exec.scratch->Take<float>(sums ? parts * 2 * n : 0).data();
  if (sums) std::fill_n(partial, parts * 2 * n, 0.0F);
  ctx.exec.pool->Run(parts, [&](int64_t part, int worker) {
    float* own = sums ? partial + part * 2 * n : nullptr;
    for (int64_t r = part * part_rows; r < std::min(rows, (part + 1) * part_rows); ++r) {
      ctx.graph->rows.layer_norm_gradient(x + r * n, norm.gamma.data(), y_grad + r * n, static_cast<int>(n),
                                          norm.eps, x_grad == nullptr ? unused + worker * n : x_grad + r * n,
                                          own, sums ? own + n : nullptr);
    }
  });
  for (int64_t part = 0; part < parts && sums; ++part) {
    const float* own = partial + part * 2 * n;
    for (int64_t i = 0; i < n; ++i) {
      if (out.gamma != nullptr) out.gamma[i] += own[i];
      if (out.beta != nullptr) out.beta[i] += own[n + i];
    }
  }
}

}  // namespace moesaic::science
