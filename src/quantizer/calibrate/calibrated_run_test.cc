// Tests `quantize --method gptq`: its output, and resumption after interruptions.
#include "quantizer/calibrate/calibrated_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>

#include "kernels/kernel_table.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/io/journal.h"
#include "quantizer/test_quantize.h"
#include "runtime/test_sync_log.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using ::testing::HasSubstr;

class CalibratedRunTest : public QuantizeTest {
 protected:
  CalibratedRunTest() {
    options_.output.gptq = options_.output.search = true;
    options_.save_share = 1;
  }
};

struct Case {
  const char* golden;
  Scheme scheme;
};
void PrintTo(const Case& each, std::ostream* out) {
  *out << each.golden << " as " << SchemeName(each.scheme);
}

class CalibratedSource : public CalibratedRunTest, public ::testing::WithParamInterface<Case> {};

TEST_P(CalibratedSource, OutputIsCompleteAndLosesLessThanRounding) {
  options_.output.scheme = GetParam().scheme;
  const StatusOr<QuantizeReport> report = Run(Golden(GetParam().golden), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->calibration.linears.size(), report->rounded) << "every linear is calibrated";
  double loss = 0, nearest = 0;
  for (const LinearFinding& linear : report->calibration.linears) {
    EXPECT_TRUE(linear.tokens > 0 || linear.shrinkage == 1)
        << linear.name << " has neither tokens nor shrinkage";
    loss += linear.loss;
    nearest += linear.loss / linear.of_nearest;
  }
  EXPECT_LT(loss, nearest);
  const StatusOr<VerifyReport> verified = Check(Golden(GetParam().golden), "out");
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->rounded, report->rounded);
  EXPECT_TRUE(fs::exists(folder_.Path("out") + "/" + kReportFile));
  for (const auto& entry : fs::directory_iterator(folder_.Path("out"))) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("calibration-")) << entry.path();
  }
  models::TestModel model(folder_.Path("out"), models::BestIsa(), {});
  EXPECT_TRUE(model.status().ok()) << model.status();
}

INSTANTIATE_TEST_SUITE_P(
    , CalibratedSource,
    ::testing::Values(Case{"kimi-k2", Scheme::kW8A8}, Case{"deepseek-v3-fp8", Scheme::kFp8},
                      Case{"deepseek-v3-mtp", Scheme::kFp8}, Case{"deepseek-v3-noqlora", Scheme::kW8A8},
                      Case{"qwen3-moe-norm-tied", Scheme::kNvfp4}, Case{"pangu-ultra-moe-mtp", Scheme::kW8A8},
                      Case{"ct-llama-int4-actorder", Scheme::kW4A16},
                      Case{"llama3-rope-bias", Scheme::kW4A16}),
    [](const auto& test) {
      return models::TestName(test.param.golden) + "_" + SchemeName(test.param.scheme);
    });

TEST_F(CalibratedRunTest, BytesDoNotDependOnThreadsUnitsOrSaving) {
  options_.output.scheme = Scheme::kNvfp4;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "one", 1).ok());
  const auto expected = FilesOf(folder_.Path("one"));
  options_.save_share = 0;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "three", 3).ok());
  EXPECT_EQ(FilesOf(folder_.Path("three")), expected);
  options_.sizes.unit_bytes = 1;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "cut").ok());
  EXPECT_EQ(FilesOf(folder_.Path("cut")), expected);
}

TEST_F(CalibratedRunTest, BytesDoNotDependOnMemoryLimits) {
  const std::string source = Golden("kimi-k2");  // its first layer has no experts
  options_.output.scheme = Scheme::kW8A8;
  // Batches have several sequences and are split into parts within them.
  options_.calibration = TestSequences({500, 490, 301, 300, 290, 133, 512}, 160);
  ASSERT_TRUE(Run(source, "ample").ok());
  for (const CalibrationLimits& limits :
       {CalibrationLimits{512, 1 << 14, 1}, CalibrationLimits{1024, 1 << 15, 1}, CalibrationLimits{512}}) {
    options_.limits = limits;
    const std::string out = fmt::format("{}-{}", limits.part_rows, limits.in_order_inputs);
    const StatusOr<QuantizeReport> report = Run(source, out);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(FilesOf(folder_.Path(out)), FilesOf(folder_.Path("ample"))) << out;
  }
}

TEST_F(CalibratedRunTest, BytesDoNotDependOnTheSlabSize) {
  const std::string source = Golden("deepseek-v3-fp8");  // linears of up to 144 rows
  options_.output.scheme = Scheme::kFp8;
  ASSERT_TRUE(Run(source, "whole").ok());
  CalibrationLimits limits;
  limits.slab_values = 1;  // 128 rows, the minimum
  options_.limits = limits;
  ASSERT_TRUE(Run(source, "cut").ok());
  EXPECT_EQ(FilesOf(folder_.Path("cut")), FilesOf(folder_.Path("whole")));
}

TEST_F(CalibratedRunTest, AnalysisDoesNotDependOnMemoryLimits) {
  const std::string source = Golden("kimi-k2");
  options_.output.gptq = options_.output.search = false;
  options_.output.scheme = Scheme::kW8A8;
  options_.output.analyze = {.smoothing = true, .static_activations = true};
  options_.calibration = TestSequences({500, 490, 301, 300, 290, 133, 512}, 160);
  ASSERT_TRUE(Run(source, "ample").ok());
  options_.limits = CalibrationLimits{512};
  ASSERT_TRUE(Run(source, "short").ok());
  EXPECT_EQ(FilesOf(folder_.Path("short")), FilesOf(folder_.Path("ample")));
}

TEST_F(CalibratedRunTest, ResumesAfterEveryInterruption) {
  const std::string source = Golden("deepseek-v3-mtp");
  options_.output.scheme = Scheme::kW8A8;
  options_.output.shard_bytes = 60'000;
  options_.sizes.unit_bytes = 60'000;
  const StatusOr<QuantizeReport> whole = Run(source, "whole");
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto expected = FilesOf(folder_.Path("whole"));
  int resumed = 0;
  for (int stop = 1;; stop += 3) {
    const std::string out = fmt::format("stopped-{}", stop);
    int calls = 0;
    options_.progress = [&](const QuantizeProgress&) { return ++calls != stop; };
    const StatusOr<QuantizeReport> first = Run(source, out);
    if (first.ok()) {
      EXPECT_GT(stop, 20);
      break;
    }
    EXPECT_EQ(first.status().code(), StatusCode::kCancelled) << first.status();
    options_.progress = nullptr;
    const StatusOr<QuantizeReport> second = Run(source, out);
    ASSERT_TRUE(second.ok()) << second.status();
    resumed += second->calibration.resumed_layers;
    EXPECT_EQ(FilesOf(folder_.Path(out)), expected) << "interrupted after " << stop;
    EXPECT_EQ(second->calibration.linears.size(), whole->calibration.linears.size());
    EXPECT_EQ(second->calibration.routing.size(), whole->calibration.routing.size());
  }
  EXPECT_GT(resumed, 5) << "states were used";
}

// After a power failure a state must find the units on which it relies.
TEST_F(CalibratedRunTest, UnitsAreOnDiskBeforeTheStateThatReliesOnThem) {
  runtime::SyncLog log;
  ASSERT_TRUE(Run(Golden("kimi-k2"), "out").ok());
  std::string order;  // w: weights, j: journal, s: state
  for (const std::string& call : log.Take()) {
    if (call.starts_with("fdatasync ") && call.ends_with(".safetensors")) order += 'w';
    if (call.starts_with("fdatasync ") && call.ends_with(kJournalFile)) order += 'j';
    if (call.starts_with("rename ") && call.ends_with(kCalibrationStateFile)) order += 's';
  }
  EXPECT_THAT(order, ::testing::MatchesRegex("(w+js)+w*")) << "each state follows weights and journal";
  EXPECT_GT(std::ranges::count(order, 's'), 1);
}

TEST_F(CalibratedRunTest, ModifiedStateIsNotUsed) {
  const std::string source = Golden("deepseek-v3-mtp");
  ASSERT_TRUE(Run(source, "whole").ok());
  for (const bool gone : {true, false}) {
    const std::string out = gone ? "gone" : "changed";
    options_.progress = [](const QuantizeProgress& at) { return !at.stage.starts_with("layer 3"); };
    ASSERT_EQ(Run(source, out).status().code(), StatusCode::kCancelled);
    options_.progress = nullptr;
    const fs::path state = folder_.Path(out) + "/calibration-2.state";
    ASSERT_TRUE(fs::exists(state));
    if (gone) {
      fs::remove(state);
    } else {
      std::fstream file(state, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(1000);
      file.put('x');
    }
    const StatusOr<QuantizeReport> again = Run(source, out);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->calibration.resumed_layers, 0);
    EXPECT_EQ(FilesOf(folder_.Path(out)), FilesOf(folder_.Path("whole")));
  }
}

// Items after the layers, such as the head, are on disk before the last state, so that every state can be
// used. A run that fails after all rounding does not calibrate again.
TEST_F(CalibratedRunTest, FailureAfterTheLayersDoesNotRepeatCalibration) {
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "whole").ok());
  fs::create_directories(folder_.Path("out") + "/config.json");  // a file cannot replace a folder
  folder_.Write("out/config.json/x", "");
  folder_.Write("out/quantize.journal", "");
  const Status failed = Run(source, "out").status();
  ASSERT_FALSE(failed.ok());
  fs::remove_all(folder_.Path("out") + "/config.json");
  const StatusOr<QuantizeReport> again = Run(source, "out");
  ASSERT_TRUE(again.ok()) << again.status();
  const auto opened = *Checkpoint::Open(source);
  EXPECT_EQ(again->calibration.resumed_layers, opened->config()["num_hidden_layers"].get<int>());
  EXPECT_EQ(again->stream.resumed_units, again->units);
  EXPECT_LT(again->stream.written_bytes, 100 * (1 << 10));  // headers
  EXPECT_EQ(again->calibration.linears.size(), again->rounded);
  EXPECT_EQ(FilesOf(folder_.Path("out")), FilesOf(folder_.Path("whole")));
  EXPECT_TRUE(Check(source, "out").ok());
}

TEST_F(CalibratedRunTest, RejectsResumingWithOtherKernels) {
  options_.progress = [](const QuantizeProgress& at) { return !at.stage.starts_with("layer 2"); };
  ASSERT_EQ(Run(Golden("kimi-k2"), "out").status().code(), StatusCode::kCancelled);
  options_.progress = nullptr;
  kernels_ = kernels::SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), runtime::Isa::kRef));
  if (runtime::HostIsas(runtime::DetectCpu()).size() < 2)
    GTEST_SKIP() << "this machine has one set of kernels";
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()), HasSubstr("started with another kernels"));
}

TEST_F(CalibratedRunTest, RejectsResumingWithOtherCalibration) {
  options_.progress = [](const QuantizeProgress& at) { return !at.stage.starts_with("layer 2"); };
  ASSERT_EQ(Run(Golden("kimi-k2"), "out").status().code(), StatusCode::kCancelled);
  options_.progress = nullptr;
  options_.calibration.front().front() ^= 1;
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()), HasSubstr("started with another settings"));
}

TEST_F(CalibratedRunTest, ReportsThinCoverage) {
  options_.calibration = {{1, 2, 3}};
  const StatusOr<QuantizeReport> report = Run(Golden("kimi-k2"), "thin");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(std::ranges::all_of(report->calibration.routing, &LayerRouting::thin));
  EXPECT_GT(std::ranges::count(report->calibration.linears, 1.0, &LinearFinding::shrinkage), 0);
}

TEST(LayerRoutingTest, IsThinIfMoreThanATenthOfTheExpertsHaveFewTokens) {
  LayerRouting routing{.layer = 1, .tokens = std::vector<int64_t>(20, kCoveredTokens)};
  routing.tokens[0] = routing.tokens[1] = 0;
  EXPECT_FALSE(routing.thin());
  routing.tokens[2] = kCoveredTokens - 1;
  EXPECT_TRUE(routing.thin());
}

TEST_F(CalibratedRunTest, TooLittleMemoryIsRejectedWithTheNeededSize) {
  options_.memory = int64_t{1} << 20;
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()),
              HasSubstr("for 195 calibration tokens (fewer tokens need less)"));
}

TEST_F(CalibratedRunTest, VerifyFindsAFlippedBit) {
  for (const char* suffix : {".weight", ".weight_scale"}) {
    const std::string out = std::string("out") + suffix;
    ASSERT_TRUE(Run(Golden("kimi-k2"), out).ok());
    const std::string name = std::string("model.layers.1.self_attn.o_proj") + suffix;
    const auto opened = *Checkpoint::Open(folder_.Path(out));
    const checkpoint::TensorEntry* entry = opened->Find(name);
    ASSERT_NE(entry, nullptr);
    std::fstream file(opened->files()[0]->path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto at = entry->bytes.data() - opened->files()[0]->bytes().data() + 2;
    const auto flipped = static_cast<char>(static_cast<int>(entry->bytes[2]) ^ 4);
    file.seekp(at);
    file.put(flipped);
    file.close();
    EXPECT_THAT(Message(Check(Golden("kimi-k2"), out).status()),
                HasSubstr("model.layers.1.self_attn.o_proj"));
  }
}

}  // namespace
}  // namespace moesaic::quantizer
