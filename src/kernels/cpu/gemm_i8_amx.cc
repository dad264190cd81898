#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_amx-inl.h"

namespace moesaic::kernels::cpu {

// A product of 16 x 16 outputs and 64 inputs takes 16 cycles and two tile loads; vpdpbusd takes 8 cycles a
// row for the same. With weights in the L2 cache tiles win from 3 rows on (measured); with weights in memory
// vector loads reach 0.92 of the bandwidth and tile loads 0.8, up to the 8 rows that vpdpbusd keeps up with.
// 4 is between.
void GemmI8Amx(const GemmTile& tile) { RunTiles<TileType::kI8>(tile, 4, GemmI8Avx512Vnni); }

}  // namespace moesaic::kernels::cpu
