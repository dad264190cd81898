// An NVIDIA card through its driver, cuBLAS and cuSOLVER.
#include <array>
#include <charconv>
#include <string_view>

#include "kernels/cuda/accelerator_check.h"
#include "kernels/cuda/compile.h"
#include "kernels/cuda/libraries.h"
#include "kernels/gptq_accelerator.h"

namespace moesaic::kernels {
namespace cuda {
namespace {

// From cuda.h, library_types.h, cublas_api.h and cusolver_common.h.
constexpr int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE
constexpr int kOutOfMemory = 2;
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_*
constexpr int kNotTransposed = 0, kTransposed = 1;              // CUBLAS_OP_N, CUBLAS_OP_T
constexpr int kF32 = 0, kBF16 = 14;                             // CUDA_R_32F, CUDA_R_16BF
constexpr int kCompute32F = 68, kDefaultAlgorithm = -1;
constexpr int kSumsInF32 = 16;  // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
constexpr int kLower = 0;       // CUBLAS_FILL_MODE_LOWER

constexpr int kMinArch = 80;  // the first capability with bf16 products
constexpr const char* kKernelNames[kDeviceKernels] = {"OrderMatrix",   "ReverseFactor", "CopyDiagonal",
                                                      "GatherWeights", "RoundInt8",     "RoundInt4",
                                                      "RoundE2M1",     "RoundE4M3"};

std::string CudaName(std::string_view call) { return fmt::format("cu{}", call.substr(0, call.find('('))); }

Status Failed(const Driver& driver, const std::string& call, int error) {
  const char* text = nullptr;
  if (driver.GetErrorString(error, &text) != 0 || text == nullptr) text = "unknown error";
  const std::string message = fmt::format("CUDA's {} failed: {} ({})", call, text, error);
  return error == kOutOfMemory ? ResourceExhausted("{}; stop other programs on the card", message)
                               : Status(StatusCode::kInternal, message);
}

// An error names `call` like CUDA: MemAlloc(...) is cuMemAlloc.
#define RETURN_IF_CUDA(driver, call)                                               \
  do {                                                                             \
    if (const int error_ = (driver).call; error_ != 0)                             \
      return Failed(driver, CudaName(#call), error_); /* NOLINT: a macro's name */ \
  } while (false)

Status FailedLibrary(const char* call, int status) {
  return Status(StatusCode::kInternal, fmt::format("{} failed with status {}", call, status));
}

struct Card {
  int device = 0, arch = 0, multiprocessors = 0;
  std::string name;
  int64_t memory_bytes = 0;
};

StatusOr<int> CountCards(const Driver& driver) {
  if (const int error = driver.Init(0); error == kNoDevice) {
    return 0;
  } else if (error != 0) {
    return Failed(driver, "cuInit", error);
  }
  int count = 0;
  RETURN_IF_CUDA(driver, DeviceGetCount(&count));
  return count;
}

StatusOr<Card> Look(const Driver& driver, int index) {
  Card card;
  RETURN_IF_CUDA(driver, DeviceGet(&card.device, index));
  char name[256] = {};
  RETURN_IF_CUDA(driver, DeviceGetName(name, sizeof(name) - 1, card.device));
  card.name = name;
  int major = 0, minor = 0;
  RETURN_IF_CUDA(driver, DeviceGetAttribute(&major, kMajor, card.device));
  RETURN_IF_CUDA(driver, DeviceGetAttribute(&minor, kMinor, card.device));
  RETURN_IF_CUDA(driver, DeviceGetAttribute(&card.multiprocessors, kMultiprocessors, card.device));
  card.arch = 10 * major + minor;
  size_t bytes = 0;
  RETURN_IF_CUDA(driver, DeviceTotalMem(&bytes, card.device));
  card.memory_bytes = static_cast<int64_t>(bytes);
  return card;
}

class CudaAccelerator final : public GptqAccelerator {
 public:
  static StatusOr<std::unique_ptr<GptqAccelerator>> Open(int index) {
    ASSIGN_OR_RETURN(const Driver driver, OpenDriver());
    ASSIGN_OR_RETURN(const int count, CountCards(driver));
    if (index >= count) return NotFound("the driver finds {} cards, none is number {}", count, index);
    ASSIGN_OR_RETURN(Card card, Look(driver, index));
    if (card.arch < kMinArch) {
      return Unimplemented("{} has compute capability {}.{}; products of bf16 need 8.0", card.name,
                           card.arch / 10, card.arch % 10);
    }
    int driver_version = 0;
    RETURN_IF_CUDA(driver, GetVersion(&driver_version));
    ASSIGN_OR_RETURN(const Libraries libraries, OpenLibraries(driver_version / 1000));
    std::unique_ptr<CudaAccelerator> device(new CudaAccelerator(driver, libraries, std::move(card)));
    RETURN_IF_ERROR(device->Begin());
    RETURN_IF_ERROR(CheckAccelerator(*device));
    return device;
  }
  ~CudaAccelerator() override {
    if (context_ == nullptr) return;
    driver_.CtxSetCurrent(context_);
    if (solver_ != nullptr) libraries_.solver.Destroy(solver_);
    if (blas_ != nullptr) libraries_.blas.Destroy(blas_);
    if (module_ != nullptr) driver_.ModuleUnload(module_);
    driver_.PrimaryCtxRelease(card_.device);
  }
  CudaAccelerator(const CudaAccelerator&) = delete;
  CudaAccelerator& operator=(const CudaAccelerator&) = delete;

  const GptqAcceleratorInfo& info() const override { return info_; }
  StatusOr<int64_t> FreeBytes() override {
    RETURN_IF_ERROR(Enter());
    size_t free = 0, total = 0;
    RETURN_IF_CUDA(driver_, MemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }

  StatusOr<void*> Allocate(int64_t bytes) override {
    RETURN_IF_ERROR(Enter());
    DevicePointer memory = 0;
    RETURN_IF_CUDA(driver_, MemAlloc(&memory, static_cast<size_t>(bytes)));
    return reinterpret_cast<void*>(memory);  // NOLINT(performance-no-int-to-ptr): CUDA's own
  }
  void Free(void* memory) override {
    if (Enter().ok()) driver_.MemFree(Address(memory));
  }
  Status Upload(void* to, const void* from, int64_t bytes) override {
    RETURN_IF_ERROR(Enter());
    RETURN_IF_CUDA(driver_, MemcpyHtoD(Address(to), from, static_cast<size_t>(bytes)));
    return OkStatus();
  }
  Status Download(void* to, const void* from, int64_t bytes) override {
    RETURN_IF_ERROR(Enter());
    RETURN_IF_CUDA(driver_, MemcpyDtoH(to, Address(from), static_cast<size_t>(bytes)));
    return OkStatus();
  }
  Status Zero(void* memory, int64_t bytes) override {
    RETURN_IF_ERROR(Enter());
    RETURN_IF_CUDA(driver_, MemsetD8Async(Address(memory), 0, static_cast<size_t>(bytes), nullptr));
    return OkStatus();
  }

  // cuBLAS is column-major: c^T = b^T a^T.
  Status Gemm(const DeviceGemm& g) override {
    RETURN_IF_ERROR(Enter());
    const float one = 1, beta = g.accumulate ? 1 : 0;
    const int status = libraries_.blas.GemmEx(
        blas_, kNotTransposed, g.transpose_a ? kTransposed : kNotTransposed, g.n, g.m, g.depth, &one, g.b,
        kBF16, static_cast<int>(g.b_stride), g.a, kBF16, static_cast<int>(g.a_stride), &beta, g.c, kF32,
        static_cast<int>(g.c_stride), kCompute32F, kDefaultAlgorithm);
    return status == 0 ? OkStatus() : FailedLibrary("cublasGemmEx", status);
  }

  StatusOr<int64_t> CholeskyBytes(int k) override {
    RETURN_IF_ERROR(Enter());
    int floats = 0;
    const int status = libraries_.solver.SpotrfBufferSize(solver_, kLower, k, nullptr, k, &floats);
    if (status != 0) return FailedLibrary("cusolverDnSpotrf_bufferSize", status);
    return kInfoBytes + int64_t{floats} * int64_t{sizeof(float)};
  }
  StatusOr<bool> Cholesky(float* matrix, int k, void* work) override {
    ASSIGN_OR_RETURN(const int64_t bytes, CholeskyBytes(k));
    auto* const info = static_cast<int*>(work);
    auto* const floats = reinterpret_cast<float*>(static_cast<std::byte*>(work) + kInfoBytes);
    const auto count = static_cast<int>((bytes - kInfoBytes) / int64_t{sizeof(float)});
    const int status = libraries_.solver.Spotrf(solver_, kLower, k, matrix, k, floats, count, info);
    if (status != 0) return FailedLibrary("cusolverDnSpotrf", status);
    int failed = 0;
    RETURN_IF_ERROR(Download(&failed, info, sizeof(failed)));
    if (failed < 0) return FailedLibrary("cusolverDnSpotrf", failed);
    return failed == 0;
  }

  Status Launch(DeviceKernel kernel, int64_t blocks, int threads, const void* arguments) override {
    RETURN_IF_ERROR(Enter());
    void* parameters[] = {const_cast<void*>(arguments)};  // read only
    RETURN_IF_CUDA(driver_,
                   LaunchKernel(kernels_[static_cast<size_t>(kernel)], static_cast<unsigned>(blocks), 1, 1,
                                static_cast<unsigned>(threads), 1, 1, 0, nullptr, parameters, nullptr));
    return OkStatus();
  }

 private:
  static constexpr int64_t kInfoBytes = 256;  // keeps the following data aligned

  CudaAccelerator(const Driver& driver, const Libraries& libraries, Card card)
      : driver_(driver), libraries_(libraries), card_(std::move(card)) {}

  static DevicePointer Address(const void* memory) { return reinterpret_cast<DevicePointer>(memory); }
  // A context belongs to a thread, and the calling thread may change.
  Status Enter() {
    RETURN_IF_CUDA(driver_, CtxSetCurrent(context_));
    return OkStatus();
  }

  Status Begin() {
    RETURN_IF_CUDA(driver_, PrimaryCtxRetain(&context_, card_.device));
    RETURN_IF_ERROR(Enter());
    ASSIGN_OR_RETURN(const std::string image, CompileGptq(libraries_.nvrtc, card_.arch));
    RETURN_IF_CUDA(driver_, ModuleLoadData(&module_, image.data()));
    for (int i = 0; i < kDeviceKernels; ++i) {
      RETURN_IF_CUDA(driver_, ModuleGetFunction(&kernels_[i], module_, kKernelNames[i]));
    }
    if (const int status = libraries_.blas.Create(&blas_); status != 0) {
      return FailedLibrary("cublasCreate", status);
    }
    if (const int status = libraries_.blas.SetMathMode(blas_, kSumsInF32); status != 0) {
      return FailedLibrary("cublasSetMathMode", status);
    }
    if (const int status = libraries_.solver.Create(&solver_); status != 0) {
      return FailedLibrary("cusolverDnCreate", status);
    }
    return Identify();
  }

  Status Identify() {
    int driver = 0, blas = 0, solver = 0, major = 0, minor = 0;
    RETURN_IF_CUDA(driver_, GetVersion(&driver));
    if (const int status = libraries_.blas.GetVersion(blas_, &blas); status != 0) {
      return FailedLibrary("cublasGetVersion", status);
    }
    if (const int status = libraries_.solver.GetVersion(&solver); status != 0) {
      return FailedLibrary("cusolverGetVersion", status);
    }
    if (const int status = libraries_.nvrtc.Version(&major, &minor); status != 0) {
      return FailedLibrary("nvrtcVersion", status);
    }
    info_ = {
        .name = card_.name,
        .identity = fmt::format("{}, compute capability {}.{}, {} multiprocessors, driver for CUDA {}.{}, "
                                "cuBLAS {}, cuSOLVER {}, NVRTC {}.{}",
                                card_.name, card_.arch / 10, card_.arch % 10, card_.multiprocessors,
                                driver / 1000, driver % 1000 / 10, blas, solver, major, minor),
        .memory_bytes = card_.memory_bytes};
    return OkStatus();
  }

  const Driver driver_;
  const Libraries libraries_;
  const Card card_;
  GptqAcceleratorInfo info_;
  void* context_ = nullptr;
  void* module_ = nullptr;
  std::array<void*, kDeviceKernels> kernels_ = {};
  void* blas_ = nullptr;
  void* solver_ = nullptr;
};

}  // namespace
}  // namespace cuda

StatusOr<int> CardOf(const std::string& device) {
  int index = 0;
  if (device == "cuda") return index;
  const char* const end = device.data() + device.size();
  const size_t prefix = std::string("cuda:").size();
  const auto read = device.starts_with("cuda:")
                        ? std::from_chars(device.data() + prefix, end, index)
                        : std::from_chars_result{device.data(), std::errc::invalid_argument};
  if (read.ec != std::errc() || read.ptr != end || index < 0) {
    return InvalidArgument("a device is cpu, cuda or cuda:N, found \"{}\"", device);
  }
  return index;
}

StatusOr<std::unique_ptr<GptqAccelerator>> OpenGptqAccelerator(const std::string& device) {
  ASSIGN_OR_RETURN(const int card, CardOf(device));
  return cuda::CudaAccelerator::Open(card);
}

StatusOr<std::vector<GptqAcceleratorEntry>> ListGptqAccelerators() {
  ASSIGN_OR_RETURN(const cuda::Driver driver, cuda::OpenDriver());
  ASSIGN_OR_RETURN(const int count, cuda::CountCards(driver));
  std::vector<GptqAcceleratorEntry> devices;
  for (int i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const cuda::Card card, cuda::Look(driver, i));
    devices.push_back({.device = fmt::format("cuda:{}", i),
                       .name = card.name,
                       .capability = fmt::format("{}.{}", card.arch / 10, card.arch % 10),
                       .memory_bytes = card.memory_bytes});
  }
  return devices;
}

}  // namespace moesaic::kernels
