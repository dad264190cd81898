#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"

namespace moesaic::kernels::cpu {

// Fewer than 4 rows that are left over go to vectors, as gemm_list.cc explains for whole products.
void GemmI8Amx(const GemmTile& tile) { RunTiles<TileType::kI8>(tile, 4, GemmI8Avx512Vnni); }

}  // namespace moesaic::kernels::cpu
