#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_avx2-inl.h"

namespace moesaic::kernels::cpu {
namespace {

struct AvxVnni : Avx2Base {
  // In place and in the VEX encoding.
  template <typename Format>
  static void Dot(Ints& acc, Ints codes, Ints x) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(codes), "x"(x));
  }
};

}  // namespace

void GemmI8G32AvxVnni(const GemmTile& tile) { RunBlocks<Grouped<AvxVnni, I8G32>>(tile); }
void GemmI4G32AvxVnni(const GemmTile& tile) { RunBlocks<Grouped<AvxVnni, I4G32>>(tile); }
void GemmMxfp4AvxVnni(const GemmTile& tile) { RunBlocks<Grouped<AvxVnni, Mxfp4>>(tile); }
void GemmNvfp4AvxVnni(const GemmTile& tile) { RunBlocks<Grouped<AvxVnni, Nvfp4>>(tile); }
void GemmQ4KAvxVnni(const GemmTile& tile) { RunBlocks<Grouped<AvxVnni, Q4K>>(tile); }
void GemmQ6KAvxVnni(const GemmTile& tile) { RunBlocks<Grouped<AvxVnni, Q6K>>(tile); }

}  // namespace moesaic::kernels::cpu
