#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"
#include "kernels/cpu/gemm_bf16-inl.h"

namespace moesaic::kernels::cpu {

// Few rows go to the multiply-adds of the AVX-512 kernel, which sums in the tiles' own order
// (gemm_bf16-inl.h).
void GemmBF16Amx(const GemmTile& tile) {
  const FlushDenormals flush;  // for bias and accumulation, as in the other kernels of this order
  RunTiles<TileType::kBF16>(tile, 4, GemmBF16Avx512);
}

}  // namespace moesaic::kernels::cpu
