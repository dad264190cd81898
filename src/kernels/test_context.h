// Shared by tests of operators: an ExecContext on a small pool, and random packed matrices.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/round.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "runtime/print_isa.h"
#include "tensor/packed.h"

namespace moesaic::kernels {

/// The resources of an operator on one instruction set.
class TestContext {
 public:
  explicit TestContext(runtime::Isa isa, int threads)
      : kernels_(SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isa))),
        pool_(*runtime::ThreadPool::Create({.threads = threads, .pin = false})) {}
  /// Runs one thread for each hardware thread of a simulated machine.
  TestContext(runtime::Isa isa, const runtime::Topology& topology)
      : kernels_(SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isa))),
        pool_(*runtime::ThreadPool::Create(
            {.threads = topology.hardware_threads, .pin = true, .topology = &topology})) {}
  ExecContext context() { return {.kernels = &kernels_, .pool = pool_.get(), .scratch = &scratch_}; }
  size_t scratch_mark() const { return scratch_.Mark(); }

 private:
  KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> pool_;
  runtime::Arena scratch_;
};

/// A packed matrix with its memory and its dequantized values.
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

/// Returns `count` matrices, total_bytes apart: the experts of a layer.
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

/// A matrix in several images.
struct TestImages {
  tensor::PackedMatrix matrix;
  runtime::Buffer buffer;
};

/// Copies panels, scales and sums of `whole` to slices with layout `slice`, `stride` bytes apart.
inline void CopySlices(const tensor::PackedMatrix& whole, const tensor::PackedLayout& slice, std::byte* to,
                       int64_t stride) {
  for (int p = 0; p < whole.layout.panels(); ++p) {
    std::byte* image = to + p / slice.panels() * stride;
    const int inside = p % slice.panels();
    std::memcpy(image + inside * slice.panel_bytes, whole.panel(p), slice.panel_bytes);
    constexpr int64_t kBytes = sizeof(float) * tensor::kPanelRows;
    if (whole.has_scales()) {
      std::memcpy(image + slice.scales_offset + inside * kBytes, whole.scales() + p * tensor::kPanelRows,
                  kBytes);
    }
    if (whole.has_sums()) {
      std::memcpy(image + slice.sums_offset + inside * kBytes, whole.sums() + p * tensor::kPanelRows, kBytes);
    }
  }
}

inline TestImages Mirrored(const TestMatrix& m, int images) {
  TestImages out{.matrix = m.matrix, .buffer = {}};
  out.matrix.images = images;
  out.matrix.image_stride = m.matrix.layout.total_bytes + 192;
  out.buffer = *runtime::Buffer::Allocate(out.matrix.image_stride * images, false);
  out.matrix.data = out.buffer.data();
  for (int i = 0; i < images; ++i) {
    std::memcpy(out.buffer.data() + i * out.matrix.image_stride, m.matrix.data, m.matrix.layout.total_bytes);
  }
  return out;
}

inline TestImages Sliced(const TestMatrix& m, int slices) {
  TestImages out{.matrix = m.matrix, .buffer = {}};
  const tensor::PackedLayout& whole = m.matrix.layout;
  const int panels = base::CeilDiv(whole.panels(), slices);
  const auto slice = tensor::PackedLayout::Of(whole.format, panels * tensor::kPanelRows, whole.k);
  out.matrix.layout = slice;
  out.matrix.layout.n = whole.n;
  out.matrix.layout.n_padded = whole.n_padded;
  out.matrix.images = slices;
  out.matrix.slice_panels = panels;
  out.matrix.image_stride = slice.total_bytes + 192;
  out.buffer = *runtime::Buffer::Allocate(out.matrix.image_stride * slices, false);
  out.matrix.data = out.buffer.data();
  CopySlices(m.matrix, slice, out.buffer.data(), out.matrix.image_stride);
  return out;
}

inline std::string IsaTestName(const testing::TestParamInfo<runtime::Isa>& info) {
  return runtime::IsaName(info.param);
}

}  // namespace moesaic::kernels
