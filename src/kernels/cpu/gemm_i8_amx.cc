#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"

namespace moesaic::kernels::cpu {

// Fewer than 4 rows that are left over go to vectors. They find their weights in the second-level cache, so
// that tiles pay sooner than for a whole product of few rows (gemm_list.cc).
void GemmI8Amx(const GemmTile& tile) { RunTiles<TileType::kI8>(tile, 4, GemmI8Avx512Vnni); }

}  // namespace moesaic::kernels::cpu
