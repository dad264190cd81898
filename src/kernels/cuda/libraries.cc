#include "kernels/cuda/libraries.h"

#include <dlfcn.h>

#include <span>

namespace moesaic::kernels::cuda {
namespace {

constexpr char kInstall[] =
    "install CUDA 12 or 13's libraries (NVIDIA's cuda-libraries package, or nvidia-cuda-nvrtc, nvidia-cublas "
    "and nvidia-cusolver from PyPI, for CUDA 12 with -cu12 after each name, with their lib folders in "
    "LD_LIBRARY_PATH)";

// File names of one CUDA release.
struct Release {
  int cuda;
  const char *nvrtc, *blas, *solver;
};
constexpr Release kReleases[] = {{13, "libnvrtc.so.13", "libcublas.so.13", "libcusolver.so.12"},
                                 {12, "libnvrtc.so.12", "libcublas.so.12", "libcusolver.so.11"}};

struct Symbol {
  const char* name;
  void* function;  // receives its address
};

StatusOr<void*> Open(const char* file, const char* remedy) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  // dlerror begins with the file's name, or with that of a library it needs.
  const char* const why = dlerror();
  return NotFound("{}; {}", why != nullptr ? why : file, remedy);
}

Status Find(void* library, const char* file, std::span<const Symbol> symbols) {
  for (const Symbol& symbol : symbols) {
    void* const found = dlsym(library, symbol.name);
    if (found == nullptr)
      return NotFound("{} has no {}: it belongs to another CUDA version; {}", file, symbol.name, kInstall);
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

// Opens the libraries of a release other than NVRTC.
StatusOr<Libraries> FindLibraries(const Release& release, void* nvrtc) {
  Libraries l;
  ASSIGN_OR_RETURN(l.nvrtc, FindNvrtc(nvrtc, release.nvrtc));
  // cuSOLVER needs the same cuBLAS.
  ASSIGN_OR_RETURN(void* const blas, Open(release.blas, kInstall));
  const Symbol of_blas[] = {{"cublasCreate_v2", &l.blas.Create},
                            {"cublasDestroy_v2", &l.blas.Destroy},
                            {"cublasGetVersion_v2", &l.blas.GetVersion},
                            {"cublasSetMathMode", &l.blas.SetMathMode},
                            {"cublasGemmEx", &l.blas.GemmEx}};
  RETURN_IF_ERROR(Find(blas, release.blas, of_blas));
  ASSIGN_OR_RETURN(void* const solver, Open(release.solver, kInstall));
  const Symbol of_solver[] = {{"cusolverGetVersion", &l.solver.GetVersion},
                              {"cusolverDnCreate", &l.solver.Create},
                              {"cusolverDnDestroy", &l.solver.Destroy},
                              {"cusolverDnSpotrf_bufferSize", &l.solver.SpotrfBufferSize},
                              {"cusolverDnSpotrf", &l.solver.Spotrf}};
  RETURN_IF_ERROR(Find(solver, release.solver, of_solver));
  return l;
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
  Status missing;
  for (const Release& release : kReleases) {
    const StatusOr<void*> library = Open(release.nvrtc, kInstall);
    if (library.ok()) return FindNvrtc(*library, release.nvrtc);
    missing = library.status();
  }
  return missing;
}

StatusOr<Libraries> OpenLibraries(int newest) {
  Status missing = NotFound("the driver runs CUDA {} at most, and 12 is needed: install a newer one", newest);
  bool partly = false;  // whether `missing` belongs to a release that is partly installed
  for (const Release& release : kReleases) {
    if (release.cuda > newest) continue;
    const StatusOr<void*> nvrtc = Open(release.nvrtc, kInstall);
    StatusOr<Libraries> libraries =
        nvrtc.ok() ? FindLibraries(release, *nvrtc) : StatusOr<Libraries>(nvrtc.status());
    if (libraries.ok()) return libraries;
    if (!partly) missing = libraries.status();
    partly |= nvrtc.ok();
  }
  return missing;
}

}  // namespace moesaic::kernels::cuda
