#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"

namespace moesaic::kernels::cpu {

// A product of 16 x 16 outputs and 64 inputs takes 16 cycles and two tile loads; vpdpbusd takes 8 cycles a
// row for the same. Measured break-even: 4 rows.
void GemmI8Amx(const GemmTile& tile) { RunTiles<TileType::kI8>(tile, 4, GemmI8Avx512Vnni); }

}  // namespace moesaic::kernels::cpu
