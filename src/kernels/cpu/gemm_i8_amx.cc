#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"

namespace moesaic::kernels::cpu {

// A remainder of fewer than 4 rows runs on vector code. Its weights are in the L2 cache, so the crossover is
// lower than for a whole product of few rows (gemm_list.cc).
void GemmI8Amx(const GemmTile& tile) { RunTiles<TileType::kI8>(tile, 4, GemmI8Avx512Vnni); }

}  // namespace moesaic::kernels::cpu
