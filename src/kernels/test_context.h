// What tests of operators share: an ExecContext on a small pool, and random packed matrices.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace moesaic::kernels {

/// An operator's surroundings on one instruction set.
class TestContext {
 public:
  explicit TestContext(runtime::Isa isa, int threads)
      : kernels_(SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isa))),
        pool_(*runtime::ThreadPool::Create({.threads = threads, .pin = false})) {}
  ExecContext context() { return {.kernels = &kernels_, .pool = pool_.get(), .scratch = &scratch_}; }
  size_t scratch_mark() const { return scratch_.Mark(); }

 private:
  KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> pool_;
  runtime::Arena scratch_;
};

/// A packed matrix with its memory and the values that it stands for.
struct TestMatrix {
  tensor::PackedMatrix matrix;
  runtime::Buffer buffer;
  std::vector<float> values;  // [n, k] as unpacked
};

inline std::vector<float> RandomValues(std::mt19937* rng, size_t count, float bound) {
  std::uniform_real_distribution<float> uniform(-bound, bound);
  std::vector<float> values(count);
  for (float& v : values) v = uniform(*rng);
  return values;
}

/// `count` matrices one after another, total_bytes apart: the experts of a layer.
inline TestMatrix RandomMatrix(std::mt19937* rng, tensor::PackedFormat format, int n, int k, int count = 1) {
  TestMatrix m;
  m.matrix.layout = tensor::PackedLayout::Of(format, n, k);
  const int64_t bytes = m.matrix.layout.total_bytes;
  m.buffer = *runtime::Buffer::Allocate(bytes * count, false);
  m.matrix.data = m.buffer.data();
  m.values.resize(size_t(n) * k * count);
  for (int i = 0; i < count; ++i) {
    const std::vector<float> w = RandomValues(rng, size_t(n) * k, 1);
    tensor::PackRows(m.matrix.layout, 0, n, w.data(), m.buffer.data() + i * bytes);
    tensor::PackedMatrix one = m.matrix;
    one.data += i * bytes;
    for (int row = 0; row < n; ++row) {
      tensor::UnpackRow(one, row, {&m.values[(size_t(i) * n + row) * k], static_cast<size_t>(k)});
    }
  }
  return m;
}

inline std::string IsaTestName(const testing::TestParamInfo<runtime::Isa>& info) {
  return runtime::IsaName(info.param);
}

}  // namespace moesaic::kernels
