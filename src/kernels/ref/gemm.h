// Reference implementations of the GEMM micro-kernels: the oracle of their tests, and the fallback on
// processors without the others' instruction sets.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::ref {

float PrepareF32(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);
float PrepareBF16(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);
float PrepareS8(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out);

void GemmF32(const GemmTile& tile);
void GemmBF16(const GemmTile& tile);
void GemmI8(const GemmTile& tile);      // activations from PrepareS8
void GemmF8G128(const GemmTile& tile);  // activations from PrepareBF16

}  // namespace moesaic::kernels::ref
