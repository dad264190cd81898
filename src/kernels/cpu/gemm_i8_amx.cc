#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"

namespace moesaic::kernels::cpu {

// Fewer than 4 rows that are left over go to vectors: they find their weights in the second-level cache,
// where tiles win from 3 rows on.
void GemmI8Amx(const GemmTile& tile) { RunTiles<TileType::kI8>(tile, 4, GemmI8Avx512Vnni); }

}  // namespace moesaic::kernels::cpu
