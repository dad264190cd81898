// A GPTQ accelerator: a card with its own memory, matrix products, and the kernels of GPTQ. cuda/ holds the
// driver for NVIDIA cards, which has not run on a card in this project's tests. The tests' stand-in runs the
// same kernels on the CPU (cuda/test_accelerator.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::kernels {

struct GptqAcceleratorInfo {
  std::string name;          // for example "NVIDIA H200"
  std::string identity;      // name and versions of every component that can change a result's bits
  int64_t memory_bytes = 0;  // memory of the card
};

/// Sets or accumulates c [m, n] f32 (+)= a [m, depth] b [depth, n], all row-major; a and b are bf16, sums
/// f32. Equal shapes and values give bit-identical results.
struct DeviceGemm {
  bool transpose_a = false;  // a is stored as [depth, m]
  int m = 0, n = 0, depth = 0;
  const uint16_t* a = nullptr;
  const uint16_t* b = nullptr;
  float* c = nullptr;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;  // elements between stored rows
  bool accumulate = false;
};

/// Kernels of cuda/gptq.cu, each with the arguments struct of its name (cuda/gptq_args.h); gptq_steps.h
/// launches them. The rounding kernels are in the order of NumberGrid.
enum class DeviceKernel : uint8_t {
  kOrderMatrix,
  kReverseFactor,
  kCopyDiagonal,
  kGatherWeights,
  kRoundInt8,
  kRoundInt4,
  kRoundE2M1,
  kRoundE4M3,
};
inline constexpr int kDeviceKernels = 8;

/// Maximum matrix order of libraries that count a matrix's elements in 32 bits: 46,340 x 46,340 < 2^31.
inline constexpr int kMaxCholesky = 46340;

/// Calls must come from one thread at a time and execute in order, asynchronously. A call may return the
/// error of an earlier one. When Download returns, all earlier calls are complete.
class GptqAccelerator {
 public:
  virtual ~GptqAccelerator() = default;
  virtual const GptqAcceleratorInfo& info() const = 0;
  virtual StatusOr<int64_t> FreeBytes() = 0;

  virtual StatusOr<void*> Allocate(int64_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual Status Upload(void* to, const void* from, int64_t bytes) = 0;
  virtual Status Download(void* to, const void* from, int64_t bytes) = 0;
  virtual Status Zero(void* memory, int64_t bytes) = 0;

  virtual Status Gemm(const DeviceGemm& gemm) = 0;
  /// Factors the symmetric matrix [k, k] in place, L L^T = matrix: L(r, c) is stored at matrix[c * k + r] for
  /// r >= c, and other elements are undefined. k is at most kMaxCholesky. Returns false if the matrix is not
  /// positive definite. Uses CholeskyBytes(k) bytes of `work`.
  virtual StatusOr<bool> Cholesky(float* matrix, int k, void* work) = 0;
  virtual StatusOr<int64_t> CholeskyBytes(int k) = 0;
  /// Launches `blocks` blocks of `threads` threads. `arguments` is a struct of gptq_args.h, copied by the
  /// call.
  virtual Status Launch(DeviceKernel kernel, int64_t blocks, int threads, const void* arguments) = 0;
};

/// Deleter that frees device memory.
struct DeviceFree {
  GptqAccelerator* device = nullptr;
  void operator()(void* memory) const { device->Free(memory); }
};

/// Owns device memory.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  static StatusOr<DeviceBuffer> Allocate(GptqAccelerator& device, int64_t bytes) {
    DeviceBuffer buffer;
    ASSIGN_OR_RETURN(void* const memory, device.Allocate(bytes));
    buffer.memory_ = {memory, DeviceFree{&device}};
    return buffer;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }

 private:
  std::unique_ptr<void, DeviceFree> memory_;
};

/// Returns N for "cuda:N" and 0 for "cuda"; other names are errors.
StatusOr<int> CardOf(const std::string& device);

/// Opens "cuda" or "cuda:N". Errors name a missing driver, library or card. A card that computes wrong
/// results is an error too (cuda/accelerator_check.h).
StatusOr<std::unique_ptr<GptqAccelerator>> OpenGptqAccelerator(const std::string& device);

/// A card that OpenGptqAccelerator's "cuda:0", "cuda:1", ... would open. If none is available,
/// ListGptqAccelerators returns the reason as an error.
struct GptqAcceleratorEntry {
  std::string device;      // "cuda:0"
  std::string name;        // "NVIDIA H200"
  std::string capability;  // "9.0"
  int64_t memory_bytes = 0;
};
StatusOr<std::vector<GptqAcceleratorEntry>> ListGptqAccelerators();

}  // namespace moesaic::kernels
