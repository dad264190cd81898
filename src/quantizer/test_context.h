// Fixtures of the quantizer's tests: the machine's kernels on some threads, and correlated inputs as in real
// layers.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "quantizer/gptq/hessian.h"
#include "runtime/cpu_features.h"

namespace moesaic::quantizer {

struct TestContext {
  explicit TestContext(int threads) : TestContext(threads, runtime::HostIsas(runtime::DetectCpu()).back()) {}
  TestContext(int threads, runtime::Isa isa)
      : table(kernels::SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isa))),
        pool(*runtime::ThreadPool::Create({.threads = threads, .pin = false})),
        ctx{&table, pool.get(), &scratch} {}
  kernels::KernelTable table;
  std::unique_ptr<runtime::ThreadPool> pool;
  runtime::Arena scratch;
  kernels::ExecContext ctx;
};

/// Returns weights [n, k] with a few large ones, as in trained matrices.
inline std::vector<float> TestWeights(int n, int k, int seed) {
  std::mt19937 rng(seed);
  std::student_t_distribution<float> heavy(5);
  std::vector<float> weights(static_cast<size_t>(n) * k);
  for (float& w : weights) w = 0.02F * heavy(rng);
  return weights;
}

/// Returns tokens [tokens, k]: `factors` hidden causes of decreasing strength, plus noise. A few inputs are
/// large. The causes depend on k and `layer` only, the tokens on `seed`.
inline std::vector<float> TestTokens(int tokens, int k, int layer, int seed) {
  const int factors = std::max(4, k / 4);
  std::mt19937 causes(layer), rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> map(static_cast<size_t>(factors) * k), size(k);
  for (float& m : map) m = normal(causes);
  for (float& s : size) s = std::exp(0.5F * normal(causes));
  std::vector<float> x(static_cast<size_t>(tokens) * k), cause(factors);
  for (int t = 0; t < tokens; ++t) {
    for (int f = 0; f < factors; ++f) cause[f] = normal(rng) / std::sqrt(1.0F + static_cast<float>(f));
    for (int i = 0; i < k; ++i) {
      float value = 0.3F * normal(rng);
      for (int f = 0; f < factors; ++f) value += map[f * k + i] * cause[f];
      x[static_cast<size_t>(t) * k + i] = value * size[i];
    }
  }
  return x;
}

inline TokenRows AllTokens(const std::vector<float>& x, int k) {
  return {.f32 = x.data(), .bf16 = nullptr, .stride = k, .count = static_cast<int>(x.size() / k)};
}

}  // namespace moesaic::quantizer
