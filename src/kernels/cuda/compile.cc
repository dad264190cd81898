#include "kernels/cuda/compile.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/gptq_text.h"

namespace moesaic::kernels::cuda {
namespace {

Status Failed(const char* call, int status) {
  return Status(StatusCode::kInternal, fmt::format("NVRTC: {} failed with status {}", call, status));
}

struct Program {
  const Nvrtc& nvrtc;
  void* handle = nullptr;
  ~Program() {
    if (handle != nullptr) nvrtc.DestroyProgram(&handle);
  }
};

}  // namespace

StatusOr<std::string> CompileGptq(const Nvrtc& nvrtc, int arch) {
  int count = 0;
  if (const int status = nvrtc.GetNumSupportedArchs(&count); status != 0) {
    return Failed("nvrtcGetNumSupportedArchs", status);
  }
  std::vector<int> archs(static_cast<size_t>(count));
  if (const int status = nvrtc.GetSupportedArchs(archs.data()); status != 0) {
    return Failed("nvrtcGetSupportedArchs", status);
  }
  int best = 0;
  for (const int supported : archs) {
    if (supported <= arch) best = std::max(best, supported);
  }
  if (best == 0)
    return Unimplemented("this NVRTC has no code for compute capability {}.{}", arch / 10, arch % 10);

  Program program{nvrtc};
  const char* const names[] = {kGptqArgsName};
  const char* const texts[] = {kGptqArgsText};
  if (const int status = nvrtc.CreateProgram(&program.handle, kGptqText, "gptq.cu", 1, texts, names);
      status != 0) {
    return Failed("nvrtcCreateProgram", status);
  }
  const bool cubin = best == arch;
  const std::string target = fmt::format("--gpu-architecture={}_{}", cubin ? "sm" : "compute", best);
  // No contraction: a card's rounding is bit-identical to kernels/rounding.h.
  const char* const options[] = {target.c_str(), "--std=c++17", "--fmad=false"};
  if (const int status = nvrtc.CompileProgram(program.handle, 3, options); status != 0) {
    size_t bytes = 0;
    std::string log;
    if (nvrtc.GetProgramLogSize(program.handle, &bytes) == 0) {
      log.resize(bytes);
      nvrtc.GetProgramLog(program.handle, log.data());
    }
    return Status(StatusCode::kInternal,
                  fmt::format("NVRTC refuses gptq.cu for {}, status {}: {}", target, status, log.c_str()));
  }
  size_t bytes = 0;
  if (const int status = (cubin ? nvrtc.GetCUBINSize : nvrtc.GetPTXSize)(program.handle, &bytes);
      status != 0) {
    return Failed("the size of its code", status);
  }
  std::string image(bytes, '\0');
  if (const int status = (cubin ? nvrtc.GetCUBIN : nvrtc.GetPTX)(program.handle, image.data()); status != 0) {
    return Failed("its code", status);
  }
  return image;
}

}  // namespace moesaic::kernels::cuda
