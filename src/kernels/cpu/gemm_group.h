// GEMM micro-kernels of group-scaled weights and the quantization of their activations, whose layout is
// documented in gemm_group_formats-inl.h. All instruction sets give the same bits.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels {

#define MOESAIC_GROUP_KERNELS(isa)           \
  void GemmI8G32##isa(const GemmTile& tile); \
  void GemmI4G32##isa(const GemmTile& tile); \
  void GemmMxfp4##isa(const GemmTile& tile); \
  void GemmNvfp4##isa(const GemmTile& tile); \
  void GemmQ4K##isa(const GemmTile& tile);   \
  void GemmQ6K##isa(const GemmTile& tile);
#define MOESAIC_GROUP_PREPARATIONS(isa)                                                          \
  float PrepareI8G32##isa(const float* x, int k, int k_padded, tensor::StaticScale static_scale, \
                          std::byte* out);                                                       \
  float PrepareI4G32##isa(const float* x, int k, int k_padded, tensor::StaticScale static_scale, \
                          std::byte* out);                                                       \
  float PrepareMxfp4##isa(const float* x, int k, int k_padded, tensor::StaticScale static_scale, \
                          std::byte* out);                                                       \
  float PrepareNvfp4##isa(const float* x, int k, int k_padded, tensor::StaticScale static_scale, \
                          std::byte* out);                                                       \
  float PrepareQ4K##isa(const float* x, int k, int k_padded, tensor::StaticScale static_scale,   \
                        std::byte* out);                                                         \
  float PrepareQ6K##isa(const float* x, int k, int k_padded, tensor::StaticScale static_scale,   \
                        std::byte* out);

namespace cpu {

MOESAIC_GROUP_KERNELS(Avx2)
MOESAIC_GROUP_KERNELS(AvxVnni)
MOESAIC_GROUP_KERNELS(Avx512Vnni)
MOESAIC_GROUP_KERNELS(Amx)
MOESAIC_GROUP_PREPARATIONS(Avx2)
MOESAIC_GROUP_PREPARATIONS(Avx512)

}  // namespace cpu

namespace ref {

MOESAIC_GROUP_KERNELS()
MOESAIC_GROUP_PREPARATIONS()

}  // namespace ref

#undef MOESAIC_GROUP_KERNELS
#undef MOESAIC_GROUP_PREPARATIONS

}  // namespace moesaic::kernels
