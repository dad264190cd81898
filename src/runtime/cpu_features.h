// Detects the instruction sets of the host's processor that kernels use.
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
  /// vdpbf16ps has a higher throughput of products than vfmadd231ps. This is false on Intel's processors,
  /// which start one vdpbf16ps in two cycles and two vfmadd231ps in one.
  bool fast_bf16_dots = false;
  bool amx_int8 = false;  ///< tdpbssd; the operating system permits tile data.
  bool amx_bf16 = false;  ///< tdpbf16ps; the operating system permits tile data.

  bool Has(Isa isa) const;
  /// Returns whether the host has `isa` and runs faster with it than with the weaker ones.
  bool Prefers(Isa isa) const;
};

/// Reads CPUID and XCR0 and asks Linux for the AMX tile permission.
CpuFeatures DetectCpu();

/// Drops every instruction set above `isa`, as MOESAIC_ISA=avx2 requests; Prefers(isa) is true afterwards.
/// Fails if the host lacks `isa`, so that a test never runs a different path from the one it names.
StatusOr<CpuFeatures> LimitTo(const CpuFeatures& host, Isa isa);

/// Parses "ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16" or "amx".
StatusOr<Isa> ParseIsa(const std::string& name);
std::string IsaName(Isa isa);

/// Returns every instruction set of the host, weakest first; kRef is always included.
std::vector<Isa> HostIsas(const CpuFeatures& host);

}  // namespace moesaic::runtime
