#include "runtime/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>

namespace moesaic::runtime {
namespace {

constexpr std::array kAllIsas = {Isa::kRef,        Isa::kAvx2,       Isa::kAvxVnni, Isa::kAvx512,
                                 Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx};

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers Cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool Bit(uint32_t value, int bit) { return ((value >> bit) & 1U) != 0; }

bool IsIntel() {
  const Registers vendor = Cpuid(0, 0);
  return vendor.ebx == signature_INTEL_ebx && vendor.edx == signature_INTEL_edx &&
         vendor.ecx == signature_INTEL_ecx;
}

// XCR0 tells which register files the operating system saves on a context switch (Intel SDM 1, 13.3).
uint64_t ReadXcr0() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux grants a process the 8 KiB of tile data only on request (arch/x86/include/uapi/asm/prctl.h).
bool RequestAmxTiles() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

}  // namespace

bool CpuFeatures::Has(Isa isa) const {
  switch (isa) {
    case Isa::kRef:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvxVnni:
      return avx_vnni;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Vnni:
      return avx512_vnni;
    case Isa::kAvx512Bf16:
      return avx512_bf16;
    case Isa::kAmx:
      return amx_int8 && amx_bf16;
  }
  return false;
}

bool CpuFeatures::Prefers(Isa isa) const { return Has(isa) && (isa != Isa::kAvx512Bf16 || fast_bf16_dots); }

CpuFeatures DetectCpu() {
  constexpr uint64_t kYmmState = 0x6;         // SSE and AVX
  constexpr uint64_t kZmmState = 0xe6;        // also opmask, upper halves of zmm0-15, zmm16-31
  constexpr uint64_t kTileState = 0x3 << 17;  // tile configuration and tile data
  CpuFeatures cpu;
  const Registers leaf1 = Cpuid(1, 0);
  if (!Bit(leaf1.ecx, 27)) return cpu;  // OSXSAVE: xgetbv exists
  const uint64_t xcr0 = ReadXcr0();
  const Registers leaf7 = Cpuid(7, 0);
  const Registers leaf7_1 = Cpuid(7, 1);
  if ((xcr0 & kYmmState) != kYmmState) return cpu;
  cpu.avx2 = Bit(leaf7.ebx, 5) && Bit(leaf1.ecx, 12) && Bit(leaf1.ecx, 29);  // AVX2, FMA, F16C
  cpu.avx_vnni = cpu.avx2 && Bit(leaf7_1.eax, 4);
  if ((xcr0 & kZmmState) != kZmmState) return cpu;
  cpu.avx512 = cpu.avx2 && Bit(leaf7.ebx, 16) && Bit(leaf7.ebx, 17) && Bit(leaf7.ebx, 28) &&
               Bit(leaf7.ebx, 30) && Bit(leaf7.ebx, 31);  // F, DQ, CD, BW, VL
  cpu.avx512_vnni = cpu.avx512 && Bit(leaf7.ecx, 11);
  cpu.avx512_bf16 = cpu.avx512_vnni && Bit(leaf7_1.eax, 5);
  cpu.fast_bf16_dots = cpu.avx512_bf16 && !IsIntel();
  const bool has_tiles = Bit(leaf7.edx, 24) && (xcr0 & kTileState) == kTileState;
  if (cpu.avx512_bf16 && has_tiles && RequestAmxTiles()) {
    cpu.amx_bf16 = Bit(leaf7.edx, 22);
    cpu.amx_int8 = Bit(leaf7.edx, 25);
  }
  return cpu;
}

StatusOr<CpuFeatures> LimitTo(const CpuFeatures& host, Isa isa) {
  if (!host.Has(isa))
    return InvalidArgument("this processor does not have the instruction set {}", IsaName(isa));
  CpuFeatures limited = host;
  if (isa < Isa::kAmx) limited.amx_int8 = limited.amx_bf16 = false;
  if (isa < Isa::kAvx512Bf16) limited.avx512_bf16 = limited.fast_bf16_dots = false;
  if (isa == Isa::kAvx512Bf16) limited.fast_bf16_dots = true;
  if (isa < Isa::kAvx512Vnni) limited.avx512_vnni = false;
  if (isa < Isa::kAvx512) limited.avx512 = false;
  if (isa < Isa::kAvxVnni) limited.avx_vnni = false;
  if (isa < Isa::kAvx2) limited.avx2 = false;
  return limited;
}

StatusOr<Isa> ParseIsa(const std::string& name) {
  std::string known;
  for (Isa isa : kAllIsas) {
    if (IsaName(isa) == name) return isa;
    known += (known.empty() ? "" : ", ") + IsaName(isa);
  }
  return InvalidArgument("the instruction set must be one of {}, not \"{}\"", known, name);
}

std::string IsaName(Isa isa) {
  switch (isa) {
    case Isa::kRef:
      return "ref";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvxVnni:
      return "avxvnni";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

std::vector<Isa> HostIsas(const CpuFeatures& host) {
  std::vector<Isa> isas;
  for (Isa isa : kAllIsas) {
    if (host.Has(isa)) isas.push_back(isa);
  }
  return isas;
}

}  // namespace moesaic::runtime
