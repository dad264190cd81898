// A test double for a card: memory of the process, products by plain loops, and the kernels of gptq.cu
// compiled as C++, one thread after another. A real card's results are compared with its results.
#pragma once

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/cuda/gptq_args.h"
#include "kernels/gptq_accelerator.h"
#include "tensor/dtype.h"

struct TestDim {
  unsigned x;
};
inline TestDim blockIdx, blockDim, threadIdx;  // NOLINT(readability-identifier-naming): CUDA's names
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

#define __device__
#define __global__
#define __shared__ static
#include "kernels/cuda/gptq.cu"  // NOLINT(bugprone-suspicious-include): what is tested
#undef __device__
#undef __global__
#undef __shared__

namespace moesaic::kernels {

class TestAccelerator : public GptqAccelerator {
 public:
  explicit TestAccelerator(std::string identity = "test device", int64_t memory_bytes = int64_t{1} << 30)
      : info_{.name = "test device", .identity = std::move(identity), .memory_bytes = memory_bytes} {}
  ~TestAccelerator() override {
    if (taken_ != 0) std::abort();  // a buffer outlives its device
  }

  const GptqAcceleratorInfo& info() const override { return info_; }
  StatusOr<int64_t> FreeBytes() override { return info_.memory_bytes - taken_; }
  int64_t peak_bytes() const { return peak_; }

  // The allocation is preceded by its size and filled with NaN bits.
  StatusOr<void*> Allocate(int64_t bytes) override {
    if (taken_ + bytes > info_.memory_bytes) return ResourceExhausted("the test device is full: {}", bytes);
    auto* memory =
        static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(64 + (bytes + 63) / 64 * 64)));
    std::memset(memory, 0xff, static_cast<size_t>(64 + bytes));
    std::memcpy(memory, &bytes, sizeof(bytes));
    taken_ += bytes;
    peak_ = std::max(peak_, taken_);
    return memory + 64;
  }
  void Free(void* memory) override {
    std::byte* const begin = static_cast<std::byte*>(memory) - 64;
    int64_t bytes = 0;
    std::memcpy(&bytes, begin, sizeof(bytes));
    taken_ -= bytes;
    std::free(begin);
  }
  Status Upload(void* to, const void* from, int64_t bytes) override { return Copy(to, from, bytes); }
  Status Download(void* to, const void* from, int64_t bytes) override { return Copy(to, from, bytes); }
  Status Zero(void* memory, int64_t bytes) override {
    std::memset(memory, 0, static_cast<size_t>(bytes));
    return OkStatus();
  }

  Status Gemm(const DeviceGemm& g) override {
    std::vector<float> b(static_cast<size_t>(g.depth) * g.n);
    for (int d = 0; d < g.depth; ++d) {
      for (int j = 0; j < g.n; ++j) b[int64_t{d} * g.n + j] = Value(g.b[d * g.b_stride + j]);
    }
    for (int i = 0; i < g.m; ++i) {
      float* c = g.c + i * g.c_stride;
      if (!g.accumulate) std::fill_n(c, g.n, 0.0F);
      for (int d = 0; d < g.depth; ++d) {
        const float a = Value(g.transpose_a ? g.a[d * g.a_stride + i] : g.a[i * g.a_stride + d]);
        if (a == 0) continue;
        const float* row = b.data() + int64_t{d} * g.n;
        for (int j = 0; j < g.n; ++j) c[j] += a * row[j];
      }
    }
    return OkStatus();
  }

  StatusOr<bool> Cholesky(float* matrix, int k, void*) override {
    for (int64_t c = 0; c < k; ++c) {
      float* column = matrix + c * k;
      for (int64_t d = 0; d < c; ++d) {
        const float* other = matrix + d * k;
        const float scale = other[c];
        if (scale == 0) continue;
        for (int64_t r = c; r < k; ++r) column[r] -= scale * other[r];
      }
      if (!(column[c] > 0)) return false;
      const float root = std::sqrt(column[c]);
      for (int64_t r = c; r < k; ++r) column[r] /= root;
    }
    return true;
  }
  StatusOr<int64_t> CholeskyBytes(int) override { return 64; }

  Status Launch(DeviceKernel kernel, int64_t blocks, int threads, const void* arguments) override {
    switch (kernel) {
      case DeviceKernel::kOrderMatrix:
        return Run(cuda::OrderMatrix, blocks, threads, arguments);
      case DeviceKernel::kReverseFactor:
        return Run(cuda::ReverseFactor, blocks, threads, arguments);
      case DeviceKernel::kCopyDiagonal:
        return Run(cuda::CopyDiagonal, blocks, threads, arguments);
      case DeviceKernel::kGatherWeights:
        return Run(cuda::GatherWeights, blocks, threads, arguments);
      case DeviceKernel::kRoundInt8:
        return Run(cuda::RoundInt8, blocks, threads, arguments);
      case DeviceKernel::kRoundInt4:
        return Run(cuda::RoundInt4, blocks, threads, arguments);
      case DeviceKernel::kRoundE2M1:
        return Run(cuda::RoundE2M1, blocks, threads, arguments);
      case DeviceKernel::kRoundE4M3:
        return Run(cuda::RoundE4M3, blocks, threads, arguments);
    }
    std::abort();
  }

 private:
  static float Value(uint16_t bits) { return tensor::ToFloat(tensor::BF16{bits}); }
  static Status Copy(void* to, const void* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return OkStatus();
  }
  template <typename Args>
  static Status Run(void (*kernel)(Args), int64_t blocks, int threads, const void* arguments) {
    const auto& args = *static_cast<const std::remove_const_t<Args>*>(arguments);
    blockDim.x = static_cast<unsigned>(threads);
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(args);
    }
    return OkStatus();
  }

  GptqAcceleratorInfo info_;
  int64_t taken_ = 0, peak_ = 0;
};

}  // namespace moesaic::kernels
