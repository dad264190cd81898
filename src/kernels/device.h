// A device beside the processor: memory of its own, products of matrices, and GPTQ's kernels. Drivers stand
// behind it (cuda/); a test's stand-in runs the same kernels on the processor (cuda/test_device.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::kernels {

struct DeviceInfo {
  std::string name;          // "NVIDIA H200"
  std::string identity;      // name, and the versions of all that decides which bits come out
  int64_t memory_bytes = 0;  // of the card
};

/// c [m, n] f32 (+)= a [m, depth] b [depth, n], rows one after another; a and b bf16, sums f32. Results are
/// the same to the bit whenever shapes and values are.
struct DeviceGemm {
  bool a_turned = false;  // a stands as [depth, m]
  int m = 0, n = 0, depth = 0;
  const uint16_t* a = nullptr;
  const uint16_t* b = nullptr;
  float* c = nullptr;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;  // elements between rows as they stand
  bool accumulate = false;
};

/// Kernels of cuda/gptq.cu, each with the arguments of its name (cuda/gptq_args.h); gptq_steps.h calls them.
/// Those of rounding stand in the order of NumberGrid.
enum class DeviceKernel : uint8_t {
  kOrderMatrix,
  kTurnFactor,
  kCopyDiagonal,
  kGatherWeights,
  kRoundInt8,
  kRoundInt4,
  kRoundE2M1,
  kRoundE4M3,
};
inline constexpr int kDeviceKernels = 8;

/// A library that counts a matrix's elements in 32 bits takes no larger one: 46,340 x 46,340 < 2^31.
inline constexpr int kMostCholesky = 46340;

/// Calls come from one thread at a time and are carried out one after another. A call may fail for one before
/// it: what was asked for is there when Download has returned.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  virtual StatusOr<int64_t> FreeBytes() = 0;

  virtual StatusOr<void*> Allocate(int64_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual Status Upload(void* to, const void* from, int64_t bytes) = 0;
  virtual Status Download(void* to, const void* from, int64_t bytes) = 0;
  virtual Status Zero(void* memory, int64_t bytes) = 0;

  virtual Status Gemm(const DeviceGemm& gemm) = 0;
  /// Turns the symmetric matrix [k, k] into L, L L^T = matrix: L(r, c) is matrix[c * k + r] for r >= c, and
  /// what is elsewhere may be anything; k is at most kMostCholesky. False: it is not positive definite. Takes
  /// CholeskyBytes(k) of `work`.
  virtual StatusOr<bool> Cholesky(float* matrix, int k, void* work) = 0;
  virtual StatusOr<int64_t> CholeskyBytes(int k) = 0;
  /// Runs `blocks` blocks of `threads` threads. `arguments`: a struct of gptq_args.h, copied by the call.
  virtual Status Launch(DeviceKernel kernel, int64_t blocks, int threads, const void* arguments) = 0;
};

/// Gives memory of a device back.
struct DeviceFree {
  Device* device = nullptr;
  void operator()(void* memory) const { device->Free(memory); }
};

/// Memory of a device, given back with its owner.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  static StatusOr<DeviceBuffer> Allocate(Device& device, int64_t bytes) {
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

/// N of "cuda:N", 0 of "cuda"; another name is an error.
StatusOr<int> CardOf(const std::string& device);

/// Opens "cuda" or "cuda:N". What is missing for it (a driver, a library, the card) is an error that names
/// it, and so is a card that gives wrong results (cuda/device_check.h).
StatusOr<std::unique_ptr<Device>> OpenDevice(const std::string& device);

/// The cards that OpenDevice's "cuda:0", "cuda:1", ... would be; an error says why none can be had.
struct DeviceEntry {
  std::string device;      // "cuda:0"
  std::string name;        // "NVIDIA H200"
  std::string capability;  // "9.0"
  int64_t memory_bytes = 0;
};
StatusOr<std::vector<DeviceEntry>> ListDevices();

}  // namespace moesaic::kernels
