#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"

namespace moesaic::kernels::cpu {

// GemmBF16Avx512 gives the same bits.
void GemmBF16Amx(const GemmTile& tile) {
  const FlushDenormals flush;  // for bias and accumulation, as in the other kernels with this summation order
  RunTiles<TileType::kBF16>(tile, 1, nullptr);
}

}  // namespace moesaic::kernels::cpu
