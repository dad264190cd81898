// Tests that smoothing alone changes nothing, and that the decisions of an analysis are applied to the
// folder.
#include "quantizer/calibrate/analysis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "quantizer/io/hidden_state.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using ::testing::HasSubstr;

class AnalysisTest : public QuantizeTest {
 protected:
  std::string Weights(const std::string& out) { return FilesOf(folder_.Path(out)).at("model.safetensors"); }
};

class FoldingTest : public AnalysisTest, public ::testing::WithParamInterface<const char*> {};

// Powers of two pass norms, products and bf16 without rounding.
TEST_P(FoldingTest, SmoothingByPowersOfTwoChangesNoLogit) {
  const std::string source = Golden(GetParam());
  const auto opened = *Checkpoint::Open(source);
  const models::DecoderSpec spec = *models::SpecFromConfig(opened->config(), "config.json");
  auto analysis = std::make_shared<Analysis>();
  analysis->folding = Folding(spec.sandwich_norm);
  std::mt19937 rng(3);
  size_t makers = 0;
  const std::vector<ModelItem> items = *ListItems(*opened);
  for (const ModelItem& item : items) {
    const std::string maker = Folding::MakerOf(item.name, spec.sandwich_norm);
    if (!item.linear || maker.empty() || analysis->folding.scales().contains(maker)) continue;
    std::vector<float> scales(static_cast<size_t>(item.shape[1]));
    for (float& s : scales) s = std::ldexp(1.0F, static_cast<int>(rng() % 7) - 3);
    analysis->folding.Add(maker, std::move(scales));
    ++makers;
  }
  EXPECT_GE(makers, size_t(2 * spec.layers));
  options_.output.analysis = analysis;
  options_.output.keep = {{tensor::DType::kBF16, "."}};
  const StatusOr<QuantizeReport> report = Run(source, "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->rounded, 0U);

  std::vector<int32_t> tokens, rows;
  for (int i = 0; i < 40; ++i) {
    tokens.push_back((i * 37 + 5) % spec.vocab);
    rows.push_back(i);
  }
  std::vector<std::vector<float>> logits;
  for (const std::string& path : {source, folder_.Path("out")}) {
    models::TestModel model(path, models::BestIsa(), {.load_mtp = false});
    ASSERT_TRUE(model.status().ok()) << model.status();
    const models::TestCache cache(model->info().kv, 1, 64);
    logits.push_back(models::Feed(model, cache, 0, 0, tokens, rows).logits);
  }
  EXPECT_EQ(logits[0], logits[1]);
}

INSTANTIATE_TEST_SUITE_P(, FoldingTest,
                         ::testing::Values("kimi-k2", "qwen3-moe-norm-tied", "pangu-ultra-moe-v11",
                                           "llama3-rope-bias", "deepseek-v3-noqlora", "glm4-moe"),
                         [](const auto& test) { return models::TestName(test.param); });

TEST_F(AnalysisTest, StaticScalesAndSmoothingAreWrittenToTheFolder) {
  const std::string source = Golden("qwen3-moe-norm-tied");
  // Half of the linears are within the tolerance.
  options_.output.analyze = {.smoothing = true, .static_activations = true, .static_tolerance = 1e9};
  const StatusOr<QuantizeReport> all = Run(source, "all");
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->analysis->input_scales.size(), all->rounded);
  std::vector<double> ratios;
  for (const AnalysisFinding& finding : all->analysis->findings) {
    ratios.push_back(finding.static_loss / finding.dynamic_loss);
  }
  std::ranges::sort(ratios);
  options_.output.analyze.static_tolerance = ratios[ratios.size() / 2];
  const StatusOr<QuantizeReport> report = Run(source, "out");
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_NE(report->analysis, nullptr);
  const std::map<std::string, float>& scales = report->analysis->input_scales;
  EXPECT_GT(scales.size(), 0U);
  EXPECT_LT(scales.size(), report->rounded) << "some linears are better with dynamic scales";
  EXPECT_FALSE(report->analysis->folding.empty());
  const auto opened = *Checkpoint::Open(folder_.Path("out"));
  const auto before = *Checkpoint::Open(source);
  const std::vector<ModelItem> items = *ListItems(*before);
  for (const ModelItem& item : items) {
    if (!item.roundable) continue;
    const auto linear = opened->FindLinear(item.name, item.shape[0], item.shape[1]);
    ASSERT_TRUE(linear.ok()) << linear.status();
    EXPECT_EQ(linear->input_scale, scales.contains(item.name) ? scales.at(item.name) : 0) << item.name;
    EXPECT_EQ(linear->dynamic_activations, !scales.contains(item.name)) << item.name;
  }
  const StatusOr<VerifyReport> verified = Check(source, "out");
  ASSERT_TRUE(verified.ok()) << verified.status();
  models::TestModel model(folder_.Path("out"), models::BestIsa(), {});
  EXPECT_TRUE(model.status().ok()) << model.status();

  // GPTQ reuses the same analysis.
  options_.output.gptq = options_.output.search = true;
  const StatusOr<QuantizeReport> gptq = Run(source, "gptq");
  ASSERT_TRUE(gptq.ok()) << gptq.status();
  EXPECT_EQ(gptq->analysis->Checksum(), report->analysis->Checksum());
  EXPECT_TRUE(Check(source, "gptq").ok());
}

TEST_F(AnalysisTest, ResumesAfterEveryInterruption) {
  options_.output.analyze = {.smoothing = true, .static_activations = true};
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "whole").ok());
  options_.sizes.unit_bytes = 60'000;
  options_.save_share = 1;
  int whole = 0;  // progress calls of an uninterrupted analysis
  options_.progress = [&](const QuantizeProgress& at) {
    whole += at.stage.starts_with("analyzing") ? 1 : 0;
    return true;
  };
  ASSERT_TRUE(Run(source, "counted").ok());
  ASSERT_GT(whole, 20);
  int less = 0, after = 0;
  for (int stop = 1; after < 2; stop += 4) {
    const std::string out = fmt::format("stopped-{}", stop);
    int calls = 0, analyzed = 0;
    bool within = false;  // interrupted within the analysis; a longer one has more calls
    options_.progress = [&](const QuantizeProgress& at) {
      within = at.stage.starts_with("analyzing");
      return ++calls != stop;
    };
    const Status stopped = Run(source, out).status();
    if (stopped.ok()) break;
    ASSERT_EQ(stopped.code(), StatusCode::kCancelled);
    options_.progress = [&](const QuantizeProgress& at) {
      analyzed += at.stage.starts_with("analyzing") ? 1 : 0;
      return true;
    };
    const bool saved = fs::exists(folder_.Path(out) + "/" + kAnalysisFile) ||
                       fs::exists(folder_.Path(out) + "/" + kAnalysisStateFile);
    const StatusOr<QuantizeReport> again = Run(source, out);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->analysis_resumed, saved) << "its time covers a part only";
    EXPECT_EQ(again->Json(options_.output)["resumed_analysis"].get<bool>(), saved);
    EXPECT_EQ(analyzed > 0, within) << "a complete analysis is not repeated";
    after += within ? 0 : 1;
    less += analyzed < whole ? 1 : 0;
    EXPECT_EQ(FilesOf(folder_.Path(out)), FilesOf(folder_.Path("whole"))) << "interrupted after " << stop;
  }
  EXPECT_GT(less, 3) << "states were used";
  EXPECT_EQ(after, 2) << "interrupted after the analysis";
}

TEST_F(AnalysisTest, UnfinishedFilesOfAKilledRunAreIgnored) {
  options_.output.analyze = {.smoothing = true, .static_activations = true};
  options_.save_share = 1;
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "whole").ok());
  int calls = 0;
  options_.progress = [&](const QuantizeProgress&) { return ++calls < 10; };
  ASSERT_EQ(Run(source, "killed").status().code(), StatusCode::kCancelled);
  const std::string out = folder_.Path("killed");
  ASSERT_FALSE(fs::exists(fs::path(out) / kJournalFile)) << "interrupted within the analysis";
  for (const char* name : {"analysis-1.state.1-0.partial", "quantize.analysis.1-0.partial"}) {
    std::ofstream(fs::path(out) / name) << "a part";
  }
  options_.progress = nullptr;
  const StatusOr<QuantizeReport> again = Run(source, "killed");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(FilesOf(out), FilesOf(folder_.Path("whole")));
}

TEST_F(AnalysisTest, ModifiedStateIsNotUsed) {
  // All linears are within the tolerance.
  options_.output.analyze = {.smoothing = true, .static_activations = true, .static_tolerance = 1e9};
  options_.save_share = 1;
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "whole").ok());
  enum class Harm { kGone, kHeader, kLastByte, kFindings, kInputScales };
  const std::string decided = "analysis-decided-1.state";
  for (const std::string& file :
       {std::string("analysis-1.state"), decided, std::string(kAnalysisStateFile)}) {
    for (const Harm harm :
         {Harm::kGone, Harm::kHeader, Harm::kLastByte, Harm::kFindings, Harm::kInputScales}) {
      const bool texts = harm == Harm::kFindings || harm == Harm::kInputScales;
      if (texts && file != decided) continue;
      const std::string out = fmt::format("{}-{}", file, static_cast<int>(harm));
      options_.progress = [](const QuantizeProgress& at) {
        return !at.stage.starts_with("analyzing layer 2");
      };
      ASSERT_EQ(Run(source, out).status().code(), StatusCode::kCancelled);
      options_.progress = nullptr;
      const fs::path state = folder_.Path(out) + "/" + file;
      ASSERT_TRUE(fs::exists(state)) << state;
      if (harm == Harm::kGone) {
        fs::remove(state);
      } else {
        std::string bytes = FilesOf(folder_.Path(out)).at(file);
        size_t at = harm == Harm::kHeader ? 100 : bytes.size() - 1;
        if (texts) {  // changes a digit of a number
          const std::string name = harm == Harm::kFindings ? "static_loss" : "input_scales";
          at = bytes.find_first_of("1234567", bytes.find("0.", bytes.find(name)));
        }
        ASSERT_LT(at, bytes.size());
        bytes[at] = static_cast<char>(bytes[at] ^ 1);
        std::ofstream(state, std::ios::binary) << bytes;
      }
      const StatusOr<QuantizeReport> again = Run(source, out);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(FilesOf(folder_.Path(out)), FilesOf(folder_.Path("whole")));
    }
  }
}

TEST_F(AnalysisTest, AnotherAnalysisIsRejected) {
  options_.output.analyze = {.smoothing = true};
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "out").ok());
  options_.output.analyze = {.smoothing = true, .static_activations = true};
  ASSERT_TRUE(Run(source, "other").ok());
  fs::copy_file(folder_.Path("other") + "/" + kAnalysisFile, folder_.Path("out") + "/" + kAnalysisFile,
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(Message(Check(source, "out").status()),
              HasSubstr("differs from the analysis that the weights were made with"));
}

// The folder may come from anywhere, so the checksum of its analysis is no proof of its content.
TEST_F(AnalysisTest, ScalesThatDoNotFitTheModelAreRejected) {
  options_.output.analyze = {.smoothing = true};
  const std::string source = Golden("kimi-k2");
  ASSERT_TRUE(Run(source, "out").ok());
  const std::string path = folder_.Path("out") + "/" + kAnalysisFile, norm = "model.layers.0.input_layernorm";
  const Analysis good = *Analysis::Load(path, "", /*sandwich=*/false);
  const auto size = static_cast<size_t>((*Checkpoint::Open(source))->config()["hidden_size"].get<int64_t>());
  std::string sum = good.Checksum();
  const auto check = [&](const std::vector<float>& scales) {
    Analysis changed = good;
    changed.folding.Add(norm, scales);
    EXPECT_TRUE(changed.Save(path, "").ok());
    for (const auto& [name, bytes] : FilesOf(folder_.Path("out"))) {
      std::string text = bytes;
      for (size_t at = 0; (at = text.find(sum, at)) != std::string::npos;) {
        text.replace(at, sum.size(), changed.Checksum());
      }
      folder_.Write("out/" + name, text);
    }
    sum = changed.Checksum();
    return Check(source, "out").status();
  };
  for (const auto& [scales, message] :
       {std::pair(std::vector<float>(1, 1.0F), "must be scaled by 48 numbers, found 1"),
        {std::vector<float>(size, 0.0F), "input_layernorm must have positive and finite scales, found 0"},
        {std::vector<float>(size, -1.0F), "found -1"},
        {std::vector<float>(size, INFINITY), "found inf"}}) {
    const Status status = check(scales);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_THAT(Message(status), HasSubstr(message));
  }
}

TEST(OutputSettingsTest, NumbersOutOfRangeAreRejected) {
  const auto code = [](const char* text) {
    return OutputSettings::FromJson(text, "model.safetensors").status().code();
  };
  const char* mix = R"({{"mix": {{"options": ["bf16"], "tokens": 1, "bits_per_weight": 8}}, "method": "rtn",
                       "shard_bytes": {}}})";
  EXPECT_EQ(code(fmt::format(fmt::runtime(mix), 1).c_str()), StatusCode::kOk);
  for (const int64_t bytes : {0, -1}) {
    EXPECT_EQ(code(fmt::format(fmt::runtime(mix), bytes).c_str()), StatusCode::kDataLoss);
  }
  const char* grouped = R"({{"scheme": "w4a16", "method": "rtn", "shard_bytes": 1, "group_size": {}}})";
  EXPECT_EQ(code(fmt::format(fmt::runtime(grouped), 32).c_str()), StatusCode::kOk);
  for (const int64_t size : {int64_t{-32}, int64_t{1} << 32}) {
    EXPECT_EQ(code(fmt::format(fmt::runtime(grouped), size).c_str()), StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace moesaic::quantizer
