// GEMM micro-kernels of every instruction set and the quantization of their activations. Formats of
// activations: f32 unchanged (ref/gemm.h); bf16 rounded to nearest even; int8 either signed ("s8") or biased
// by 128 ("u8", for dot instructions that multiply unsigned by signed). gemm_group.h declares those of
// group-scaled weights.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

float PrepareBF16Avx2(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);
float PrepareBF16Avx512(const float* x, int k, int k_padded, tensor::StaticScale static_scale,
                        std::byte* out);
float PrepareS8Avx2(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);
float PrepareU8Avx2(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);
float PrepareU8Avx512(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);

void GemmF32Avx2(const GemmTile& tile);
void GemmF32Avx512(const GemmTile& tile);

void GemmBF16Avx2(const GemmTile& tile);
void GemmBF16Avx512(const GemmTile& tile);
void GemmBF16Avx512BF16(const GemmTile& tile);
void GemmBF16Amx(const GemmTile& tile);

void GemmI8Avx2(const GemmTile& tile);
void GemmI8AvxVnni(const GemmTile& tile);
void GemmI8Avx512Vnni(const GemmTile& tile);
void GemmI8Amx(const GemmTile& tile);

}  // namespace moesaic::kernels::cpu
