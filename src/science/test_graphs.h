// Shared by tests of graph operators: workspaces on every instruction set, random graphs and feature
// matrices.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "science/elements.h"
#include "science/graph.h"
#include "science/graph_kernels.h"

namespace moesaic::graph {

/// Instruction sets with graph kernels of their own that this host can run.
inline std::vector<runtime::Isa> GraphIsas() {
  std::vector<runtime::Isa> found;
  const runtime::CpuFeatures host = runtime::DetectCpu();
  for (const runtime::Isa isa : {runtime::Isa::kRef, runtime::Isa::kAvx2, runtime::Isa::kAvx512}) {
    if (host.Has(isa)) found.push_back(isa);
  }
  return found;
}

inline std::unique_ptr<Workspace> MakeWorkspace(runtime::Isa isa, int threads) {
  return *Workspace::Create(threads, *runtime::LimitTo(runtime::DetectCpu(), isa));
}

/// A feature matrix with its memory, whose rows are `pad` elements apart more than needed.
class TestFeatures {
 public:
  TestFeatures(tensor::DType dtype, int64_t rows, int64_t cols, int64_t pad = 0)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        stride_(cols + pad),
        bytes_(tensor::BytesOf(dtype, rows * stride_) + 64) {}
  static TestFeatures Random(std::mt19937* rng, tensor::DType dtype, int64_t rows, int64_t cols,
                             int64_t pad = 0) {
    TestFeatures x(dtype, rows, cols, pad);
    std::uniform_real_distribution<float> uniform(0.25F, 2.0F);  // no divisor near 0
    std::bernoulli_distribution negative(0.5);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) x.Set(r, c, negative(*rng) ? -uniform(*rng) : uniform(*rng));
    }
    return x;
  }
  float at(int64_t row, int64_t col) const { return LoadElement(bytes_.data(), dtype_, row * stride_ + col); }
  void Set(int64_t row, int64_t col, float value) {
    StoreElement(bytes_.data(), dtype_, row * stride_ + col, value);
  }
  void Fill(float value) {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) Set(r, c, value);
    }
  }
  Features view() const { return {bytes_.data(), dtype_, rows_, cols_, stride_}; }
  Output out() { return {bytes_.data(), dtype_, rows_, cols_, stride_}; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  tensor::DType dtype() const { return dtype_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  tensor::DType dtype_;
  int64_t rows_, cols_, stride_;
  std::vector<std::byte> bytes_;
};

/// Relative error of one rounding to the type.
inline float Unit(tensor::DType dtype) {
  if (dtype == tensor::DType::kF32) return 0x1p-24F;
  return dtype == tensor::DType::kBF16 ? 0x1p-8F : 0x1p-11F;
}

struct TestEdges {
  int64_t num_src = 0, num_dst = 0;
  std::vector<int32_t> src, dst;

  Graph Build() const {
    return *Graph::FromCoo(Indices::Of(src.data(), size()), Indices::Of(dst.data(), size()), num_src,
                           num_dst);
  }
  int64_t size() const { return static_cast<int64_t>(src.size()); }
};

/// Random edges. Some destinations stay isolated; with a hub, half of the edges end in node 1. Without loops,
/// an edge whose ends are equal begins at the next source.
inline TestEdges RandomEdges(std::mt19937* rng, int64_t num_src, int64_t num_dst, int64_t edges,
                             bool hub = false, bool loops = true) {
  TestEdges graph{.num_src = num_src, .num_dst = num_dst, .src = {}, .dst = {}};
  std::uniform_int_distribution<int32_t> src(0, static_cast<int32_t>(num_src) - 1);
  std::uniform_int_distribution<int32_t> dst(0, static_cast<int32_t>(num_dst) - 1);
  for (int64_t e = 0; e < edges; ++e) {
    graph.src.push_back(src(*rng));
    const int32_t d = dst(*rng);
    graph.dst.push_back(hub && e % 2 == 0 ? 1 : d - d % 5 / 4);  // every fifth node gets no edge
    if (!loops && graph.src.back() == graph.dst.back())
      graph.src.back() = static_cast<int32_t>((graph.src.back() + 1) % num_src);
  }
  return graph;
}

}  // namespace moesaic::graph
