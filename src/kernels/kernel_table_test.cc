#include "kernels/kernel_table.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/probe.h"

namespace moesaic::kernels {
namespace {

using runtime::CpuFeatures;
using runtime::Isa;

const KernelChoice& ChoiceOf(const KernelTable& table, const std::string& op) {
  return *std::find_if(table.choices.begin(), table.choices.end(), [&](const auto& c) { return c.op == op; });
}

// The selection must depend only on a processor's features, not on the machine that runs this test.
TEST(SelectKernels, SelectsFirstUsableAndReportsSkipped) {
  const CpuFeatures zen5{.avx2 = true,
                         .avx_vnni = true,
                         .avx512 = true,
                         .avx512_vnni = true,
                         .avx512_bf16 = true,
                         .fast_bf16_dots = true};
  const KernelTable table = SelectKernels(zen5);
  EXPECT_EQ(ChoiceOf(table, "gemm_i8").name, "gemm_i8_i8_avx512vnni");
  EXPECT_EQ(ChoiceOf(table, "gemm_i8").passed_over, std::vector<std::string>{"gemm_i8_i8_amx"});
  EXPECT_EQ(ChoiceOf(table, "gemm_bf16").name, "gemm_bf16_bf16_avx512bf16");
  EXPECT_EQ(ChoiceOf(table, "gemm_bf16").isa, Isa::kAvx512Bf16);
  EXPECT_EQ(ChoiceOf(table, "gemm_f32").name, "gemm_f32_f32_avx512");
  EXPECT_TRUE(ChoiceOf(table, "gemm_f32").passed_over.empty());

  const CpuFeatures cascade_lake{.avx2 = true, .avx512 = true, .avx512_vnni = true};
  EXPECT_EQ(ChoiceOf(SelectKernels(cascade_lake), "gemm_i8").name, "gemm_i8_i8_avx512vnni");
  EXPECT_EQ(ChoiceOf(SelectKernels(cascade_lake), "gemm_bf16").name, "gemm_bf16_bf16_avx512");
  const CpuFeatures cooper_lake{.avx2 = true, .avx512 = true, .avx512_vnni = true, .avx512_bf16 = true};
  EXPECT_EQ(ChoiceOf(SelectKernels(cooper_lake), "gemm_bf16").name, "gemm_bf16_bf16_avx512");
  EXPECT_EQ(ChoiceOf(SelectKernels(*runtime::LimitTo(cooper_lake, Isa::kAvx512Bf16)), "gemm_bf16").name,
            "gemm_bf16_bf16_avx512bf16");
  const CpuFeatures alder_lake{.avx2 = true, .avx_vnni = true};
  EXPECT_EQ(ChoiceOf(SelectKernels(alder_lake), "gemm_i8").name, "gemm_i8_i8_avxvnni");
}

TEST(SelectKernels, ReportsAttentionForEveryKvType) {
  const CpuFeatures sapphire_rapids{.avx2 = true,
                                    .avx_vnni = true,
                                    .avx512 = true,
                                    .avx512_vnni = true,
                                    .avx512_bf16 = true,
                                    .amx_int8 = true,
                                    .amx_bf16 = true};
  const KernelTable table = SelectKernels(sapphire_rapids);
  EXPECT_EQ(ChoiceOf(table, "attention_kv_bf16").name, "attention_bf16_bf16x2_amx");
  EXPECT_EQ(ChoiceOf(table, "attention_kv_i8").name, "attention_bf16_bf16x2_amx");
  EXPECT_EQ(ChoiceOf(table, "attention_kv_f32").name, "attention_f32_avx512");
}

TEST(SelectKernels, NoFeaturesSelectRefForEveryOperator) {
  const KernelTable table = SelectKernels(CpuFeatures{});
  EXPECT_GE(table.choices.size(), 9U);
  for (const KernelChoice& choice : table.choices) EXPECT_TRUE(choice.name.ends_with("_ref")) << choice.name;
}

// Names end with the required instruction set, and a limit applies to every operator.
TEST(SelectKernels, LimitAppliesToEveryOperator) {
  const CpuFeatures host = runtime::DetectCpu();
  for (Isa limit : runtime::HostIsas(host)) {
    for (const KernelChoice& choice : SelectKernels(*runtime::LimitTo(host, limit)).choices) {
      const std::string suffix = choice.name.substr(choice.name.rfind('_') + 1);
      const auto needs = runtime::ParseIsa(suffix);
      ASSERT_TRUE(needs.ok()) << choice.name;
      EXPECT_LE(*needs, limit) << choice.name;
    }
  }
}

TEST(DotPeaks, MeasuresEveryVectorFormat) {
  const CpuFeatures host = runtime::DetectCpu();
  auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = true});
  EXPECT_TRUE(MeasureDotPeaks(CpuFeatures{}, pool.get()).empty());
  for (Isa limit : runtime::HostIsas(host)) {
    if (limit == Isa::kRef) continue;
    const auto peaks = MeasureDotPeaks(*runtime::LimitTo(host, limit), pool.get());
    ASSERT_EQ(peaks.size(), 3U);
    for (const DotPeak& peak : peaks) {
      // The bounds range from a slow scalar core to a thousand fast tile units: a unit error of 1000 fails.
      EXPECT_GT(peak.one_thread, 1e9) << peak.instruction;
      EXPECT_LT(peak.one_thread, 1e14) << peak.instruction;
      EXPECT_GT(peak.all_threads, 1e9) << peak.instruction;
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
