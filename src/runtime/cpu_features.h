// What the host's processor can do, as far as kernels care.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::runtime {

/// Instruction sets in the order in which kernels prefer them, weakest first.
enum class Isa { kRef, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

/// The instruction sets that both the processor and the operating system allow.
struct CpuFeatures {
  bool avx2 = false;         ///< AVX2, FMA and F16C.
  bool avx_vnni = false;     ///< 256-bit vpdpbusd in the VEX encoding.
  bool avx512 = false;       ///< AVX-512 F, BW, DQ, VL and CD.
  bool avx512_vnni = false;  ///< vpdpbusd on 512 bits.
  bool avx512_bf16 = false;  ///< vdpbf16ps.
  /// vdpbf16ps does more products than vfmadd231ps. Not on Intel's processors, where it takes two cycles and
  /// two of vfmadd231ps go into one.
  bool fast_bf16_dots = false;
  bool amx_int8 = false;  ///< tdpbssd, with tile data permitted by the kernel.
  bool amx_bf16 = false;  ///< tdpbf16ps, likewise.

  bool Has(Isa isa) const;
  /// Has it, and is faster by it than by those before it.
  bool Gains(Isa isa) const;
};

/// Reads CPUID and XCR0 and asks Linux for the AMX tile permission.
CpuFeatures DetectCpu();

/// Drops every instruction set above `isa`, as MOESAIC_ISA=avx2 asks for; `isa` itself then gains.
/// Fails when the host lacks `isa` itself, so that a test never runs another path than it names.
StatusOr<CpuFeatures> LimitTo(const CpuFeatures& host, Isa isa);

/// Parses "ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16" or "amx".
StatusOr<Isa> ParseIsa(const std::string& name);
std::string IsaName(Isa isa);

/// Every instruction set the host has, weakest first; kRef is always there.
std::vector<Isa> HostIsas(const CpuFeatures& host);

}  // namespace moesaic::runtime
