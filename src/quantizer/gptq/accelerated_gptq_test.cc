// Compares GPTQ's stage on a device with the CPU's: on the stand-in for a card
// (kernels/cuda/test_accelerator.h), and on a card if there is one.
#include "quantizer/gptq/accelerated_gptq.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <cstring>
#include <filesystem>

#include "kernels/cuda/test_accelerator.h"
#include "kernels/gptq_accelerator.h"
#include "quantizer/gptq/test_gptq.h"
#include "quantizer/test_quantize.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {
namespace {

using kernels::GptqAccelerator;
using kernels::TestAccelerator;
using testing::HasSubstr;

InputSource Whole(const std::vector<float>& x, int k) {
  return [&x, k](const TokenSink& sink) {
    sink(AllTokens(x, k));
    return OkStatus();
  };
}

std::unique_ptr<GptqStage> StageOf(GptqAccelerator& device, int n, int k) {
  std::vector<AcceleratedGptq::Shape> shapes;
  for (const Grid& grid : kGrids) shapes.push_back({grid, n, k});
  return *AcceleratedGptq::Create(device, shapes);
}

// Two f32 sums of the same products differ by at most tokens x 2^-24 of the products' magnitudes. These add
// up to at most the root of both inputs' squares.
void ExpectSameSums(const Hessian& got, const Hessian& expected, int tokens) {
  for (int i = 0; i < got.k(); ++i) {
    for (int j = 0; j <= i; ++j) {
      const double size = std::sqrt(double{expected.sums(i)[i]} * expected.sums(j)[j]);
      ASSERT_NEAR(got.sums(i)[j], expected.sums(i)[j], 2 * tokens * 0x1p-24 * size) << i << " " << j;
    }
  }
}

// Checks that every code is the nearest to its corrected weight (test_gptq.h derives the tolerance), that
// losses are reported correctly, and that they are as low as the CPU's.
void ExpectGptqOn(GptqAccelerator& device) {
  const TestContext threads(2);
  struct Case {
    int n, k, tokens;
  };
  for (const Case& c : {Case{70, 128, 400}, Case{5, 256, 300}, Case{131, 203, 500}, Case{66, 384, 1100}}) {
    const std::vector<float> weights = TestWeights(c.n, c.k, 1), x = TestTokens(c.tokens, c.k, 1, 2);
    const auto stage = StageOf(device, c.n, c.k);
    auto hessian = *Hessian::Create(c.k);
    ASSERT_TRUE(stage->Gather(threads.ctx, Whole(x, c.k), &hessian).ok());
    const Hessian on_host = HessianOf(threads, x, c.k);
    ExpectSameSums(hessian, on_host, c.tokens);
    EXPECT_EQ(hessian.tokens(), c.tokens);
    const FactorOptions options;
    const auto factor = stage->Factor(threads.ctx, hessian, options);
    ASSERT_TRUE(factor.ok()) << factor.status();
    const auto of_host = FactorHessian(threads.ctx, hessian, options);
    EXPECT_EQ((*factor)->order, of_host->order);
    EXPECT_EQ((*factor)->diagonal, of_host->diagonal);
    const Eigen::MatrixXd h = Damped(hessian, (*factor)->damping);
    for (const Grid& grid : kGrids) {
      if (!CheckGrid(grid, c.k).ok()) continue;
      GptqReport report, expected;
      const auto matrix =
          stage->Round(threads.ctx, grid, weights.data(), c.n, c.k, **factor, {true, {}, 0}, &report);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      ExpectCodesOfGptq(weights, *matrix, **factor, h);
      const double loss = LossOf(Errors(weights, *matrix), h);
      EXPECT_NEAR(report.loss, loss, 0x1p-8 * loss);
      const auto host =
          RoundByGptq(threads.ctx, grid, weights.data(), c.n, c.k, *of_host, {true, {}, 0}, &expected);
      EXPECT_EQ(matrix->scales, host->scales);
      // The factors have relative errors of some 2^-17 and 2^-24, and some of their values round to different
      // bf16 numbers. A code that is nearly as near as the next may therefore be the next one, which changes
      // all later corrections of its row. A few in a hundred codes differ; losses hardly change.
      int64_t differ = 0;
      for (size_t i = 0; i < host->codes.size(); ++i) differ += matrix->codes[i] != host->codes[i];
      EXPECT_LE(differ, 0.1 * static_cast<double>(host->codes.size())) << static_cast<int>(grid.kind);
      EXPECT_NEAR(loss, LossOf(Errors(weights, *host), h), 0.01 * loss);
      EXPECT_NEAR(report.of_nearest, expected.of_nearest, 0.01 * expected.of_nearest);
    }
  }
}

TEST(AcceleratedGptq, RoundsLikeTheCpu) {
  TestAccelerator device;
  ExpectGptqOn(device);
}

TEST(AcceleratedGptq, RoundsLikeTheCpuOnACard) {
  const auto card = kernels::OpenGptqAccelerator("cuda");
  if (!card.ok()) GTEST_SKIP() << "no CUDA device: " << card.status();
  ExpectGptqOn(**card);
}

// bf16 inputs are used directly, and the split of tokens between calls changes no bit.
TEST(AcceleratedGptq, GathersTheSumsOfTheCpu) {
  TestAccelerator device;
  const TestContext threads(3);
  const int k = 203, tokens = 1030;
  const std::vector<float> x = TestTokens(tokens, k, 1, 17);
  const auto stage = StageOf(device, 1, k);
  const auto in_parts = [&](int part) {
    return [&, part](const TokenSink& sink) {
      for (int first = 0; first < tokens; first += part) {
        const int count = std::min(part, tokens - first);
        sink({.f32 = x.data() + int64_t{first} * k, .stride = k, .count = count});
      }
      return OkStatus();
    };
  };
  auto expected = *Hessian::Create(k), whole = *Hessian::Create(k), cut = *Hessian::Create(k);
  ASSERT_TRUE(in_parts(tokens)([&](const TokenRows& rows) { expected.Add(threads.ctx, rows); }).ok());
  ASSERT_TRUE(stage->Gather(threads.ctx, in_parts(tokens), &whole).ok());
  ASSERT_TRUE(stage->Gather(threads.ctx, in_parts(kProductTokens), &cut).ok());
  ExpectSameSums(whole, expected, tokens);
  EXPECT_EQ(whole.tokens(), expected.tokens());
  for (int i = 0; i < k; ++i) {
    ASSERT_EQ(std::vector<float>(cut.sums(i), cut.sums(i) + i + 1),
              std::vector<float>(whole.sums(i), whole.sums(i) + i + 1));
  }
  std::vector<tensor::BF16> halves(x.size());
  std::transform(x.begin(), x.end(), halves.begin(), tensor::ToBF16);
  auto of_halves = *Hessian::Create(k);
  const auto status = stage->Gather(
      threads.ctx,
      [&](const TokenSink& sink) {
        sink({.bf16 = halves.data(), .stride = k, .count = tokens});
        return OkStatus();
      },
      &of_halves);
  ASSERT_TRUE(status.ok());
  auto expected_of_halves = *Hessian::Create(k);
  expected_of_halves.Add(threads.ctx, {.bf16 = halves.data(), .stride = k, .count = tokens});
  ExpectSameSums(of_halves, expected_of_halves, tokens);
  // A premature end is reported.
  EXPECT_EQ(stage
                ->Gather(
                    threads.ctx, [](const TokenSink&) { return Cancelled("stopped"); }, &cut)
                .code(),
            StatusCode::kCancelled);
}

// Factoring a Hessian and factoring inputs directly, in memory that larger ones have used, give the same
// bits.
TEST(AcceleratedGptq, FactorOfInputsEqualsThatOfTheirHessian) {
  TestAccelerator device;
  const TestContext threads(2);
  const auto stage = StageOf(device, 40, 700);
  for (const auto& [k, tokens, damping] :
       {std::tuple{700, 900, 0.01F}, {203, 700, 0.01F}, {600, 200, 1e-9F}}) {
    const std::vector<float> x = TestTokens(tokens, k, 1, 17), weights = TestWeights(40, k, 18);
    const FactorOptions options{.damping = damping};
    const Grid grid{GridKind::kInt8Channel, 0};
    GptqReport a, b;
    auto hessian = *Hessian::Create(k);
    ASSERT_TRUE(stage->Gather(threads.ctx, Whole(x, k), &hessian).ok());
    const auto factor = stage->Factor(threads.ctx, hessian, options);
    ASSERT_TRUE(factor.ok()) << factor.status();
    const auto first = stage->Round(threads.ctx, grid, weights.data(), 40, k, **factor, {}, &a);
    const std::vector<int> order = (*factor)->order;
    const auto fresh = StageOf(device, 40, k);
    const auto made = fresh->Factor(threads.ctx, k, Whole(x, k), options);
    ASSERT_TRUE(made.ok()) << made.status();
    ASSERT_NE(made->factor, nullptr);
    EXPECT_EQ(made->factor->attempts > 1, damping < 0.01F) << "damping is raised if needed";
    EXPECT_EQ(made->factor->order, order);
    EXPECT_EQ(made->tokens, tokens);
    const auto second = fresh->Round(threads.ctx, grid, weights.data(), 40, k, *made->factor, {}, &b);
    EXPECT_EQ(first->codes, second->codes);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.of_nearest, b.of_nearest);
  }
}

TEST(AcceleratedGptq, DeadInputsKeepTheirNearestCodes) {
  TestAccelerator device;
  const TestContext threads(2);
  const int n = 20, k = 192;
  const std::vector<float> weights = TestWeights(n, k, 10);
  std::vector<float> x = TestTokens(300, k, 1, 11);
  for (size_t at = 0; at < x.size(); ++at) {
    if (at % k == 5 || at % k == 177) x[at] = 0;
  }
  const auto stage = StageOf(device, n, k);
  const auto made = stage->Factor(threads.ctx, k, Whole(x, k), {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->factor->dead, 2);
  GptqReport report;
  const Grid grid{GridKind::kInt4Group, 32};
  const auto nearest = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {});
  const auto matrix = stage->Round(threads.ctx, grid, weights.data(), n, k, *made->factor, {}, &report);
  for (int r = 0; r < n; ++r) {
    for (const int c : {5, 177}) EXPECT_EQ(matrix->codes[r * k + c], nearest->codes[r * k + c]);
  }
}

TEST(AcceleratedGptq, RejectsInputsWithoutInformation) {
  TestAccelerator device;
  const TestContext threads(1);
  const int k = 64;
  const auto stage = StageOf(device, 1, k);
  const std::vector<float> zeros(size_t{3} * k);
  const auto none = stage->Factor(threads.ctx, k, Whole(zeros, k), {});
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->factor, nullptr);
  EXPECT_THAT(Message(stage->Factor(threads.ctx, *Hessian::Create(k), {}).status()),
              HasSubstr("no calibration token"));
  std::vector<float> x = TestTokens(10, k, 1, 13);
  x[3 * k + 7] = NAN;
  EXPECT_THAT(Message(stage->Factor(threads.ctx, k, Whole(x, k), {}).status()), HasSubstr("input 7"));
  const std::vector<float> two = TestTokens(2, k, 1, 13);
  const FactorOptions stopped{.watch = [] { return Cancelled("stopped"); }};
  EXPECT_EQ(stage->Factor(threads.ctx, k, Whole(two, k), stopped).status().code(), StatusCode::kCancelled);
}

TEST(AcceleratedGptq, AllocatesAllMemoryAtOnceAndFailsIfThereIsTooLittle) {
  const AcceleratedGptq::Shape shapes[] = {{{GridKind::kInt4Group, 32}, 70, 256},
                                           {{GridKind::kNvfp4, 16}, 300, 128}};
  TestAccelerator device;
  {
    const auto stage = AcceleratedGptq::Create(device, shapes);
    ASSERT_TRUE(stage.ok()) << stage.status();
    const int64_t taken = device.peak_bytes();
    const TestContext threads(2);
    const std::vector<float> x = TestTokens(300, 256, 1, 3), weights = TestWeights(70, 256, 4);
    const auto made = (*stage)->Factor(threads.ctx, 256, Whole(x, 256), {});
    GptqReport report;
    ASSERT_TRUE((*stage)
                    ->Round(threads.ctx, shapes[0].grid, weights.data(), 70, 256, *made->factor, {}, &report)
                    .ok());
    EXPECT_EQ(device.peak_bytes(), taken);
  }
  TestAccelerator small("small", device.peak_bytes());  // leaves no memory for libraries
  const Status refused = AcceleratedGptq::Create(small, shapes).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(refused), HasSubstr(fmt::format("needs {} bytes", device.peak_bytes())));
  EXPECT_EQ(small.peak_bytes(), 0);
}

TEST(AcceleratedGptq, RejectsMatricesWithoutAllocatedMemory) {
  TestAccelerator device;
  const TestContext threads(1);
  const Grid grid{GridKind::kInt8Channel, 0};
  const AcceleratedGptq::Shape shapes[] = {{grid, 20, 128}};
  const auto stage = *AcceleratedGptq::Create(device, shapes);
  const std::vector<float> x = TestTokens(200, 129, 1, 3), narrow = TestTokens(200, 128, 1, 3);
  auto hessian = *Hessian::Create(129);
  EXPECT_EQ(stage->Gather(threads.ctx, Whole(x, 129), &hessian).code(), StatusCode::kInternal);
  EXPECT_EQ(stage->Factor(threads.ctx, 129, Whole(x, 129), {}).status().code(), StatusCode::kInternal);
  const Hessian wide = HessianOf(threads, x, 129);
  EXPECT_EQ(stage->Factor(threads.ctx, wide, {}).status().code(), StatusCode::kInternal);
  const auto made = stage->Factor(threads.ctx, 128, Whole(narrow, 128), {});
  ASSERT_TRUE(made.ok()) << made.status();
  const std::vector<float> weights = TestWeights(65, 128, 4);
  GptqReport report;
  const auto round = [&](const Grid& to, int n) {
    return stage->Round(threads.ctx, to, weights.data(), n, 128, *made->factor, {}, &report).status();
  };
  EXPECT_TRUE(round(grid, 20).ok());
  EXPECT_THAT(Message(round(grid, 65)), HasSubstr("65 rows of 128 inputs need"));
  EXPECT_EQ(round({GridKind::kNvfp4, 16}, 20).code(), StatusCode::kInternal);  // needs more scales
}

TEST(AcceleratedGptq, RejectsLinearsTooWideForTheLibrary) {
  TestAccelerator device;
  const AcceleratedGptq::Shape widest[] = {{{GridKind::kInt8Channel, 0}, 64, 46336}};
  EXPECT_EQ(AcceleratedGptq::Create(device, widest).status().code(), StatusCode::kResourceExhausted);
  const AcceleratedGptq::Shape wider[] = {{{GridKind::kInt8Channel, 0}, 64, 53248}};
  const Status refused = AcceleratedGptq::Create(device, wider).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(Message(refused), testing::AllOf(HasSubstr("53248 inputs"), HasSubstr("46336")));
}

// ---- whole runs

class DeviceRunTest : public QuantizeTest {
 protected:
  DeviceRunTest() {
    options_.output.gptq = options_.output.search = true;
    options_.save_share = 1;
  }

  // Checks that a run is complete and as good as one on the CPU.
  void ExpectGoodRunOn(GptqAccelerator& device, const std::string& golden, Scheme scheme) {
    options_.output.scheme = scheme;
    options_.calibration.clear();  // replaced: its ids belong to another vocabulary
    options_.device = nullptr;
    const auto expected = Run(Golden(golden), golden + "-host");
    options_.device = &device;
    const auto report = Run(Golden(golden), golden + "-device");
    ASSERT_TRUE(expected.ok() && report.ok()) << report.status();
    ASSERT_EQ(report->calibration.linears.size(), expected->calibration.linears.size());
    double loss = 0, of_host = 0;
    for (size_t i = 0; i < report->calibration.linears.size(); ++i) {
      const LinearFinding &mine = report->calibration.linears[i], &other = expected->calibration.linears[i];
      EXPECT_EQ(mine.name, other.name);
      EXPECT_EQ(mine.nearest, other.nearest);
      EXPECT_EQ(mine.damping, other.damping) << mine.name;
      // Earlier roundings may differ in a few codes, so the inputs differ as well.
      EXPECT_NEAR(mine.shrinkage, other.shrinkage, 0.05) << mine.name;
      loss += other.loss > 0 ? mine.loss / other.loss : 1;
      of_host += 1;
    }
    EXPECT_NEAR(loss / of_host, 1, 0.02) << golden;
    const auto verified = Check(Golden(golden), golden + "-device");
    ASSERT_TRUE(verified.ok()) << verified.status();
    EXPECT_EQ(report->device, device.info().identity);
    std::ifstream json(folder_.Path(golden + "-device") + "/" + kReportFile);
    EXPECT_EQ(nlohmann::json::parse(json).value("device", ""), device.info().identity);
  }

  // Interrupts a run in its second layer.
  void Stop(const std::string& source, const std::string& out) {
    options_.progress = [](const QuantizeProgress& at) { return !at.stage.starts_with("layer 2"); };
    ASSERT_EQ(Run(source, out).status().code(), StatusCode::kCancelled);
    options_.progress = nullptr;
  }
};

TEST_F(DeviceRunTest, RunIsCompleteAndAsGoodAsOnTheCpu) {
  TestAccelerator device;
  for (const auto& [golden, scheme] : {std::pair("kimi-k2", Scheme::kW8A8),
                                       {"deepseek-v3-fp8", Scheme::kFp8},
                                       {"qwen3-moe-norm-tied", Scheme::kNvfp4},
                                       {"llama3-rope-bias", Scheme::kW4A16}}) {
    ExpectGoodRunOn(device, golden, scheme);
  }
}

TEST_F(DeviceRunTest, RunIsCompleteOnACard) {
  const auto card = kernels::OpenGptqAccelerator("cuda");
  if (!card.ok()) GTEST_SKIP() << "no CUDA device: " << card.status();
  ExpectGoodRunOn(**card, "kimi-k2", Scheme::kW8A8);
  ExpectGoodRunOn(**card, "qwen3-moe-norm-tied", Scheme::kNvfp4);
}

TEST_F(DeviceRunTest, BytesDoNotDependOnThreadsOrTheSizeOfHessians) {
  TestAccelerator device;
  options_.device = &device;
  options_.output.scheme = Scheme::kNvfp4;
  const std::string source = Golden("qwen3-moe-norm-tied");
  ASSERT_TRUE(Run(source, "one", 1).ok());
  ASSERT_TRUE(Run(source, "three", 3).ok());
  EXPECT_EQ(FilesOf(folder_.Path("three")), FilesOf(folder_.Path("one")));
  CalibrationLimits limits;
  limits.in_order_inputs = 1;  // linears outside of experts then have no Hessian on the host
  options_.limits = limits;
  ASSERT_TRUE(Run(source, "in-order").ok());
  EXPECT_EQ(FilesOf(folder_.Path("in-order")), FilesOf(folder_.Path("one")));
}

TEST_F(DeviceRunTest, ResumesOnlyOnTheSameDevice) {
  TestAccelerator device("card A"), other("card B");
  options_.device = &device;
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "whole").ok());
  Stop(source, "out");
  for (GptqAccelerator* const wrong :
       {static_cast<GptqAccelerator*>(&other), static_cast<GptqAccelerator*>(nullptr)}) {
    options_.device = wrong;
    const Status refused = Run(source, "out").status();
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument) << refused;
    EXPECT_THAT(Message(refused), testing::AllOf(HasSubstr("another device"), HasSubstr("card A")));
  }
  options_.device = &device;
  CalibrationLimits fewer;
  fewer.slab_values = 1;
  options_.limits = fewer;
  EXPECT_THAT(Message(Run(source, "out").status()), HasSubstr("another device"));
  options_.limits.reset();
  const auto again = Run(source, "out");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->calibration.resumed_layers, 1);
  EXPECT_EQ(FilesOf(folder_.Path("out")), FilesOf(folder_.Path("whole")));
  // Nor does a run that began on the CPU resume on a device.
  options_.device = nullptr;
  Stop(source, "host");
  options_.device = &device;
  EXPECT_THAT(Message(Run(source, "host").status()), HasSubstr("another device"));
}

// A device that sums in parts whose length depends on the shape, as a library may. Each part is cut to four
// bits, so that some codes differ and not just the last digits of a loss.
class ShapedDevice final : public TestAccelerator {
 public:
  Status Gemm(const kernels::DeviceGemm& gemm) override {
    if (gemm.transpose_a) return TestAccelerator::Gemm(gemm);
    const int most = gemm.n / 8;
    for (int done = 0; done < gemm.depth; done += most) {
      kernels::DeviceGemm part = gemm;
      part.depth = std::min(most, gemm.depth - done);
      part.a += done;
      part.b += done * gemm.b_stride;
      part.accumulate |= done > 0;
      RETURN_IF_ERROR(TestAccelerator::Gemm(part));
      for (int64_t i = 0; i < gemm.m; ++i) {
        for (float& sum : std::span(gemm.c + i * gemm.c_stride, static_cast<size_t>(gemm.n))) {
          sum = std::bit_cast<float>(std::bit_cast<uint32_t>(sum) & 0xfff00000U);
        }
      }
    }
    return OkStatus();
  }
};

// The settings of the interrupted run decide, not those that this run's memory and threads would select.
TEST_F(DeviceRunTest, ResumesWithTheRowsPerSlabOfItsStart) {
  ShapedDevice device;
  options_.device = &device;
  const std::string source = Golden("deepseek-v3-fp8");  // has more inputs than one block
  CalibrationLimits fewer;
  fewer.slab_values = 1 << 13;
  options_.limits = fewer;
  options_.sizes.unit_bytes = 1 << 20;  // splits no linear, so that only the limits do
  ASSERT_TRUE(Run(source, "whole").ok());
  Stop(source, "out");
  Stop(source, "more");
  options_.limits.reset();
  options_.sizes = {};
  options_.memory = int64_t{1} << 20;
  EXPECT_THAT(Message(Run(source, "out", 3).status()), HasSubstr("too little to resume"));
  options_.memory = int64_t{2} << 30;
  const auto again = Run(source, "out", 3);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->calibration.resumed_layers, 1);
  EXPECT_EQ(FilesOf(folder_.Path("out")), FilesOf(folder_.Path("whole")));
  // A larger slab gives other bytes, so the comparison above can fail.
  const std::string path = folder_.Path("more") + "/" + kJournalFile;
  std::string journal = FilesOf(folder_.Path("more")).at(kJournalFile);
  const std::string said = R"("slab_values":8192)";
  ASSERT_THAT(journal, HasSubstr(said));
  journal.replace(journal.find(said), said.size(), R"("slab_values":16777216)");
  std::ofstream(path, std::ios::binary) << journal;
  ASSERT_TRUE(Run(source, "more", 3).ok());
  EXPECT_TRUE(FilesOf(folder_.Path("more")) != FilesOf(folder_.Path("whole")));
}

// A new run would round fewer rows at once, because its memory is just too little for all.
TEST_F(DeviceRunTest, PlansToResumeWithTheMemoryOfItsStart) {
  TestAccelerator device;
  options_.device = &device;
  std::filesystem::create_directories(folder_.Path("wide"));
  std::ifstream small(Golden("llama3-rope-bias") + "/config.json");
  nlohmann::json config = nlohmann::json::parse(small);
  config["hidden_size"] = 4096;
  config["intermediate_size"] = 14336;
  config["num_attention_heads"] = 32;
  config["num_key_value_heads"] = 8;
  config["head_dim"] = 128;
  std::ofstream(folder_.Path("wide") + "/config.json") << config.dump();
  const auto source = checkpoint::Checkpoint::Open(folder_.Path("wide") + "/config.json");
  ASSERT_TRUE(source.ok()) << source.status();
  options_.output.calibration = {.xxh3 = "", .tokens = 1 << 15, .sequences = 64, .longest = 512};
  const int64_t most = CalibrationLimits().slab_values, all = int64_t{64} << 30;
  options_.memory = all;
  options_.threads = 2;
  StatusOr<QuantizePlan> plan = PlanQuantize(**source, options_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->limits.slab_values, most);
  // The steps are smaller than the savings of the next limits.
  options_.memory = plan->calibration_bytes + (int64_t{2} << 30);
  while (plan.ok() && plan->limits.slab_values == most) {
    options_.memory -= int64_t{16} << 20;
    plan = PlanQuantize(**source, options_);
  }
  ASSERT_TRUE(plan.ok()) << plan.status();
  const UnitSizes full = plan->sizes;
  options_.slab_values = most;
  // Fewer tokens per batch save memory instead; no byte depends on them.
  options_.sizes.unit_bytes = int64_t{16} << 20;
  plan = PlanQuantize(**source, options_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->limits.slab_values, most);
  options_.sizes = full;
  for (const int threads : {1, 7}) {
    options_.threads = threads;
    plan = PlanQuantize(**source, options_);
    ASSERT_TRUE(plan.ok()) << threads << ": " << plan.status();
    EXPECT_EQ(plan->limits.slab_values, most);
  }
  options_.threads = 256;  // their scratch memory alone exceeds the limit
  EXPECT_THAT(Message(PlanQuantize(**source, options_).status()), HasSubstr("too little to resume"));
  options_.threads = 2;
  options_.memory = all;
  options_.slab_values = 1 << 20;
  plan = PlanQuantize(**source, options_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->limits.slab_values, 1 << 20) << "nor more than at its start";
}

// Opening a card may take that much, and so may the peak that the kernel reports at the end.
TEST_F(DeviceRunTest, RejectsAMemoryLimitBelowTheResidentSize) {
  TestAccelerator device;
  options_.device = &device;
  {
    const auto taken = *runtime::Buffer::Allocate(size_t{512} << 20, false);
    std::memset(taken.data(), 1, taken.size());
  }
  const int64_t peak = runtime::MeasureResidentMemory().peak;
  options_.memory = peak - (int64_t{1} << 20);
  const Status refused = Run(Golden("kimi-k2"), "out").status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(refused), HasSubstr(fmt::format("too little: {} are resident already", peak)));
  EXPECT_FALSE(std::filesystem::exists(folder_.Path("out")));
  options_.memory = peak + (int64_t{64} << 20);
  const auto report = Run(Golden("kimi-k2"), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_LE(report->peak_bytes, options_.memory);
}

TEST_F(DeviceRunTest, FailsWithoutOutputIfTheDeviceIsTooSmall) {
  TestAccelerator small("small", 1000);
  options_.device = &small;
  EXPECT_EQ(Run(Golden("kimi-k2"), "out").status().code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(std::filesystem::exists(folder_.Path("out")));
}

}  // namespace
}  // namespace moesaic::quantizer
