// NVIDIA's libraries, opened at run time: the program is built and runs without them. This header declares
// the functions used, with their signatures in CUDA 12 and 13 (unchanged since CUDA 11).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace moesaic::kernels::cuda {

using DevicePointer = uint64_t;  // CUdeviceptr

/// libcuda.so.1, part of the driver.
struct Driver {
  int (*Init)(unsigned flags);
  int (*GetVersion)(int* version);
  int (*GetErrorString)(int error, const char** text);
  int (*DeviceGetCount)(int* count);
  int (*DeviceGet)(int* device, int index);
  int (*DeviceGetName)(char* name, int size, int device);
  int (*DeviceGetAttribute)(int* value, int attribute, int device);
  int (*DeviceTotalMem)(size_t* bytes, int device);
  int (*PrimaryCtxRetain)(void** context, int device);
  int (*PrimaryCtxRelease)(int device);
  int (*CtxSetCurrent)(void* context);
  int (*MemGetInfo)(size_t* free, size_t* total);
  int (*MemAlloc)(DevicePointer* memory, size_t bytes);
  int (*MemFree)(DevicePointer memory);
  int (*MemcpyHtoD)(DevicePointer to, const void* from, size_t bytes);
  int (*MemcpyDtoH)(void* to, DevicePointer from, size_t bytes);
  int (*MemsetD8Async)(DevicePointer to, unsigned char value, size_t bytes, void* stream);
  int (*ModuleLoadData)(void** module, const void* image);
  int (*ModuleUnload)(void* module);
  int (*ModuleGetFunction)(void** function, void* module, const char* name);
  int (*LaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                      void** arguments, void** extra);
};

struct Nvrtc {
  int (*Version)(int* major, int* minor);
  int (*CreateProgram)(void** program, const char* source, const char* name, int headers,
                       const char* const* header_texts, const char* const* header_names);
  int (*DestroyProgram)(void** program);
  int (*CompileProgram)(void* program, int options, const char* const* option_texts);
  int (*GetProgramLogSize)(void* program, size_t* bytes);
  int (*GetProgramLog)(void* program, char* log);
  int (*GetCUBINSize)(void* program, size_t* bytes);
  int (*GetCUBIN)(void* program, char* image);
  int (*GetPTXSize)(void* program, size_t* bytes);
  int (*GetPTX)(void* program, char* image);
  int (*GetNumSupportedArchs)(int* count);
  int (*GetSupportedArchs)(int* archs);  // 80, 86, 90, ...
};

struct Blas {
  int (*Create)(void** handle);
  int (*Destroy)(void* handle);
  int (*GetVersion)(void* handle, int* version);
  int (*SetMathMode)(void* handle, int mode);
  // Matrices are column-major; types are cudaDataType, compute is cublasComputeType_t.
  int (*GemmEx)(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                const void* a, int type_a, int stride_a, const void* b, int type_b, int stride_b,
                const void* beta, void* c, int type_c, int stride_c, int compute, int algorithm);
};

struct Solver {
  int (*GetVersion)(int* version);
  int (*Create)(void** handle);
  int (*Destroy)(void* handle);
  int (*SpotrfBufferSize)(void* handle, int uplo, int n, float* a, int stride, int* floats);
  int (*Spotrf)(void* handle, int uplo, int n, float* a, int stride, float* work, int floats, int* info);
};

struct Libraries {
  Nvrtc nvrtc;
  Blas blas;
  Solver solver;
};

/// Opens a library for the rest of the process. Errors name the missing library or function and the package
/// that provides it.
StatusOr<Driver> OpenDriver();
StatusOr<Nvrtc> OpenNvrtc();
/// Opens all libraries of one CUDA release: the newest complete one that is not newer than the driver's
/// `newest` (12, 13, ...).
StatusOr<Libraries> OpenLibraries(int newest);

}  // namespace moesaic::kernels::cuda
