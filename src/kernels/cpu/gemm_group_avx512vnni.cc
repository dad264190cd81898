#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_avx512-inl.h"

namespace moesaic::kernels::cpu {

void GemmI8G32Avx512Vnni(const GemmTile& tile) { RunBlocks<Grouped<Avx512, I8G32>>(tile); }
void GemmI4G32Avx512Vnni(const GemmTile& tile) { RunBlocks<Grouped<Avx512, I4G32>>(tile); }
void GemmMxfp4Avx512Vnni(const GemmTile& tile) { RunBlocks<Grouped<Avx512, Mxfp4>>(tile); }
void GemmNvfp4Avx512Vnni(const GemmTile& tile) { RunBlocks<Grouped<Avx512, Nvfp4>>(tile); }
void GemmQ4KAvx512Vnni(const GemmTile& tile) { RunBlocks<Grouped<Avx512, Q4K>>(tile); }
void GemmQ6KAvx512Vnni(const GemmTile& tile) { RunBlocks<Grouped<Avx512, Q6K>>(tile); }

}  // namespace moesaic::kernels::cpu
