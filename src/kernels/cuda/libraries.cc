#include "kernels/cuda/libraries.h"

#include <dlfcn.h>

#include <span>

namespace moesaic::kernels::cuda {
namespace {

constexpr char kInstall[] =
    "install CUDA 12 or 13's libraries (NVIDIA's cuda-libraries package, or nvidia-cuda-nvrtc-cu12, "
    "nvidia-cublas-cu12 and nvidia-cusolver-cu12 from PyPI with their lib folders in LD_LIBRARY_PATH)";

// File names of one CUDA release.
struct Release {
  const char *nvrtc, *blas, *solver;
};
constexpr Release kReleases[] = {{"libnvrtc.so.13", "libcublas.so.13", "libcusolver.so.12"},
                                 {"libnvrtc.so.12", "libcublas.so.12", "libcusolver.so.11"}};

struct Symbol {
  const char* name;
  void* function;  // where its address goes
};

StatusOr<void*> Open(const char* file, const char* remedy) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  // dlerror begins with the file's name, or with that of the library it needs.
  const char* const why = dlerror();
  return NotFound("{}; {}", why != nullptr ? why : file, remedy);
}

Status Find(void* library, const char* file, std::span<const Symbol> symbols) {
  for (const Symbol& symbol : symbols) {
    void* const found = dlsym(library, symbol.name);
    if (found == nullptr)
      return NotFound("{} has no {}: it is of another CUDA; {}", file, symbol.name, kInstall);
    *static_cast<void**>(symbol.function) = found;
  }
  return OkStatus();
}

StatusOr<Nvrtc> FindNvrtc(void* library, const char* file) {
  Nvrtc n;
  const Symbol symbols[] = {{"nvrtcVersion", &n.Version},
                            {"nvrtcCreateProgram", &n.CreateProgram},
                            {"nvrtcDestroyProgram", &n.DestroyProgram},
                            {"nvrtcCompileProgram", &n.CompileProgram},
                            {"nvrtcGetProgramLogSize", &n.GetProgramLogSize},
                            {"nvrtcGetProgramLog", &n.GetProgramLog},
                            {"nvrtcGetCUBINSize", &n.GetCUBINSize},
                            {"nvrtcGetCUBIN", &n.GetCUBIN},
                            {"nvrtcGetPTXSize", &n.GetPTXSize},
                            {"nvrtcGetPTX", &n.GetPTX},
                            {"nvrtcGetNumSupportedArchs", &n.GetNumSupportedArchs},
                            {"nvrtcGetSupportedArchs", &n.GetSupportedArchs}};
  RETURN_IF_ERROR(Find(library, file, symbols));
  return n;
}

// NVRTC of the newest release that has it.
StatusOr<Nvrtc> NvrtcOf(const Release** release) {
  Status missing;
  for (const Release& candidate : kReleases) {
    const StatusOr<void*> library = Open(candidate.nvrtc, kInstall);
    if (library.ok()) {
      *release = &candidate;
      return FindNvrtc(*library, candidate.nvrtc);
    }
    missing = library.status();
  }
  return missing;
}

}  // namespace

StatusOr<Driver> OpenDriver() {
  ASSIGN_OR_RETURN(void* const library,
                   Open("libcuda.so.1",
                        "it comes with NVIDIA's driver: install that (nvidia-smi tells whether it "
                        "runs), or, in a container, start it with its GPUs"));
  Driver d;
  const Symbol symbols[] = {{"cuInit", &d.Init},
                            {"cuDriverGetVersion", &d.GetVersion},
                            {"cuGetErrorString", &d.GetErrorString},
                            {"cuDeviceGetCount", &d.DeviceGetCount},
                            {"cuDeviceGet", &d.DeviceGet},
                            {"cuDeviceGetName", &d.DeviceGetName},
                            {"cuDeviceGetAttribute", &d.DeviceGetAttribute},
                            {"cuDeviceTotalMem_v2", &d.DeviceTotalMem},
                            {"cuDevicePrimaryCtxRetain", &d.PrimaryCtxRetain},
                            {"cuDevicePrimaryCtxRelease_v2", &d.PrimaryCtxRelease},
                            {"cuCtxSetCurrent", &d.CtxSetCurrent},
                            {"cuMemGetInfo_v2", &d.MemGetInfo},
                            {"cuMemAlloc_v2", &d.MemAlloc},
                            {"cuMemFree_v2", &d.MemFree},
                            {"cuMemcpyHtoD_v2", &d.MemcpyHtoD},
                            {"cuMemcpyDtoH_v2", &d.MemcpyDtoH},
                            {"cuMemsetD8Async", &d.MemsetD8Async},
                            {"cuModuleLoadData", &d.ModuleLoadData},
                            {"cuModuleUnload", &d.ModuleUnload},
                            {"cuModuleGetFunction", &d.ModuleGetFunction},
                            {"cuLaunchKernel", &d.LaunchKernel}};
  RETURN_IF_ERROR(Find(library, "libcuda.so.1", symbols));
  return d;
}

StatusOr<Nvrtc> OpenNvrtc() {
  const Release* release = nullptr;
  return NvrtcOf(&release);
}

StatusOr<Libraries> OpenLibraries() {
  Libraries l;
  const Release* release = nullptr;
  ASSIGN_OR_RETURN(l.nvrtc, NvrtcOf(&release));
  // cuSOLVER needs the very cuBLAS.
  ASSIGN_OR_RETURN(void* const blas, Open(release->blas, kInstall));
  const Symbol of_blas[] = {{"cublasCreate_v2", &l.blas.Create},
                            {"cublasDestroy_v2", &l.blas.Destroy},
                            {"cublasGetVersion_v2", &l.blas.GetVersion},
                            {"cublasSetMathMode", &l.blas.SetMathMode},
                            {"cublasGemmEx", &l.blas.GemmEx}};
  RETURN_IF_ERROR(Find(blas, release->blas, of_blas));
  ASSIGN_OR_RETURN(void* const solver, Open(release->solver, kInstall));
  const Symbol of_solver[] = {{"cusolverGetVersion", &l.solver.GetVersion},
                              {"cusolverDnCreate", &l.solver.Create},
                              {"cusolverDnDestroy", &l.solver.Destroy},
                              {"cusolverDnSpotrf_bufferSize", &l.solver.SpotrfBufferSize},
                              {"cusolverDnSpotrf", &l.solver.Spotrf}};
  RETURN_IF_ERROR(Find(solver, release->solver, of_solver));
  return l;
}

}  // namespace moesaic::kernels::cuda
