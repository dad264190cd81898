#include "runtime/cpu_features.h"

#include <gtest/gtest.h>

namespace moesaic::runtime {
namespace {

TEST(CpuFeatures, AgreesWithCompilerDetection) {
  const CpuFeatures cpu = DetectCpu();
  EXPECT_EQ(cpu.avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(cpu.avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(cpu.avx512_vnni, cpu.avx512 && __builtin_cpu_supports("avx512vnni"));
  EXPECT_EQ(cpu.avx512_bf16, cpu.avx512_vnni && __builtin_cpu_supports("avx512bf16"));
}

TEST(CpuFeatures, NamesParseBack) {
  for (Isa isa :
       {Isa::kRef, Isa::kAvx2, Isa::kAvxVnni, Isa::kAvx512, Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx}) {
    ASSERT_TRUE(ParseIsa(IsaName(isa)).ok());
    EXPECT_EQ(*ParseIsa(IsaName(isa)), isa);
  }
  EXPECT_NE(Message(ParseIsa("sse9").status()).find("\"sse9\""), std::string::npos);
}

TEST(CpuFeatures, LimitDropsHigherInstructionSets) {
  CpuFeatures host{.avx2 = true, .avx_vnni = true, .avx512 = true, .avx512_vnni = true};
  const auto limited = LimitTo(host, Isa::kAvxVnni);
  ASSERT_TRUE(limited.ok());
  EXPECT_TRUE(limited->avx2 && limited->avx_vnni);
  EXPECT_FALSE(limited->avx512 || limited->avx512_vnni);
  EXPECT_EQ(HostIsas(*limited), (std::vector{Isa::kRef, Isa::kAvx2, Isa::kAvxVnni}));
  EXPECT_EQ(HostIsas(*LimitTo(host, Isa::kRef)), std::vector{Isa::kRef});
}

TEST(CpuFeatures, LimitToMissingInstructionSetFails) {
  const auto limited = LimitTo(CpuFeatures{.avx2 = true}, Isa::kAmx);
  ASSERT_FALSE(limited.ok());
  EXPECT_NE(Message(limited.status()).find("amx"), std::string::npos);
}

}  // namespace
}  // namespace moesaic::runtime
