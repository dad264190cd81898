// Tests that the losses of a pass equal those of rounded models, and whole runs with a mix.
#include "quantizer/mixed/mix_walk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "models/model_info.h"
#include "models/weight_decl.h"
#include "quantizer/format/weight_rows.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/mixed/variant_losses.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class MixWalkTest : public QuantizeTest {
 protected:
  void SetMix(std::initializer_list<const char*> precisions, MixBudget::Kind kind, double amount) {
    options_.output.mix = {.options = {}, .budget = {kind, amount}, .tokens = 195};
    for (const char* name : precisions) options_.output.mix.options.push_back(*ParsePrecision(name));
  }

  // Returns KL(a || b) in nats per token over the calibration's tokens.
  double Divergence(const std::string& a, const std::string& b) {
    std::vector<std::vector<float>> logits[2];
    for (int side = 0; side < 2; ++side) {
      models::TestModel model(side == 0 ? a : b, models::BestIsa(), {.load_mtp = false});
      EXPECT_TRUE(model.status().ok()) << model.status();
      for (const std::vector<int32_t>& ids : options_.calibration) {
        std::vector<int32_t> rows;
        for (int32_t i = 0; i < std::ssize(ids); ++i) rows.push_back(i);
        const models::TestCache cache(model->info().kv, 1, 128);
        logits[side].push_back(models::Feed(model, cache, 0, 0, ids, rows).logits);
      }
    }
    double sum = 0;
    size_t tokens = 0;
    for (size_t s = 0; s < logits[0].size(); ++s) {
      const size_t rows = options_.calibration[s].size(), vocab = logits[0][s].size() / rows;
      for (size_t r = 0; r < rows; ++r, ++tokens) {
        const float *p = logits[0][s].data() + r * vocab, *q = logits[1][s].data() + r * vocab;
        double p_sum = 0, q_sum = 0;
        for (size_t i = 0; i < vocab; ++i) p_sum += std::exp(double{p[i]}), q_sum += std::exp(double{q[i]});
        for (size_t i = 0; i < vocab; ++i) {
          const double log_p = p[i] - std::log(p_sum), log_q = q[i] - std::log(q_sum);
          sum += std::exp(log_p) * (log_p - log_q);
        }
      }
    }
    return sum / static_cast<double>(tokens);
  }

  static const PrecisionGroup& UnitOf(const Mix& mix, const std::string& name) {
    const auto found = std::ranges::find(mix.units, name, &PrecisionGroup::name);
    EXPECT_NE(found, mix.units.end()) << name;
    return *found;
  }

  // Multiplies a bf16 weight [n, k] of a copied golden, completely or by columns.
  static void Scale(const std::string& folder, const std::string& module, float factor) {
    const auto source = *Checkpoint::Open(folder);
    const checkpoint::TensorEntry* entry = source->Find(module + ".weight");
    ASSERT_NE(entry, nullptr) << module;
    ASSERT_EQ(entry->dtype, tensor::DType::kBF16);
    std::string path;
    int64_t offset = -1;
    for (const auto& file : source->files()) {
      const std::span<const std::byte> bytes = file->bytes();
      if (entry->bytes.data() < bytes.data() || entry->bytes.data() >= bytes.data() + bytes.size()) continue;
      path = file->path();
      offset = entry->bytes.data() - bytes.data();
    }
    ASSERT_GE(offset, 0);
    std::vector<uint16_t> values(entry->bytes.size() / 2);
    std::memcpy(values.data(), entry->bytes.data(), entry->bytes.size());
    for (uint16_t& value : values) value = tensor::ToBF16(factor * tensor::ToFloat(tensor::BF16{value})).bits;
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset);
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 2));
  }
};

// Rounds one unit only and runs the result as a model: its divergence is the loss of the pass. Both round
// activations to bf16, and sums have another order. Compared with the errors of 4-bit rounding, this noise is
// some percent.
TEST_F(MixWalkTest, LossEqualsThatOfTheModelWithOneUnitRounded) {
  struct Case {
    const char *golden, *unit, *module;
  };
  for (const Case& c :
       {Case{"qwen3-moe-norm-tied", "model.layers.1.mlp.experts", R"(layers\.1\.mlp\.experts\.)"},
        Case{"qwen3-moe-norm-tied", "model.layers.1.self_attn.qkv_proj",
             R"(layers\.1\.self_attn\.[qkv]_proj)"},
        Case{"kimi-k2", "model.layers.1.mlp.shared_experts", R"(layers\.1\.mlp\.shared_experts\.)"},
        Case{"kimi-k2", "model.layers.0.self_attn.o_proj", R"(layers\.0\.self_attn\.o_proj)"}}) {
    const std::string source = Golden(c.golden);
    options_.calibration.clear();
    options_.output = {};
    SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 16);
    const std::string mixed = fmt::format("{}-{}", c.golden, c.unit);
    const StatusOr<QuantizeReport> report = Run(source, mixed);
    ASSERT_TRUE(report.ok()) << report.status();
    const PrecisionGroup& unit = UnitOf(*report->analysis->mix, c.unit);
    ASSERT_EQ(unit.options.size(), 3U);
    EXPECT_EQ(unit.options[2].loss, 0) << "bf16 changes nothing";
    EXPECT_GT(unit.options[0].loss, unit.options[1].loss);
    for (const Scheme scheme : {Scheme::kNvfp4, Scheme::kW8A8}) {
      options_.output = {};
      options_.output.scheme = scheme;
      options_.output.keep = {{tensor::DType::kBF16, fmt::format("^(?!.*{})", c.module)}};
      const std::string alone = mixed + SchemeName(scheme);
      const StatusOr<QuantizeReport> run = Run(source, alone);
      ASSERT_TRUE(run.ok()) << run.status();
      const double expected = Divergence(source, folder_.Path(alone));
      const double loss = unit.options[scheme == Scheme::kNvfp4 ? 0 : 1].loss;
      EXPECT_NEAR(loss, expected, 0.1 * expected + 1e-5) << c.unit << " " << SchemeName(scheme);
    }
  }
}

// Powers of two keep the function; the product of gate and up exceeds fp16 in one layer.
TEST_F(MixWalkTest, LayerThatOverflowsFp16IsKeptInBf16) {
  const std::string source = CopyOf("kimi-k2");
  const auto opened = *Checkpoint::Open(source);
  const models::DecoderSpec spec = *models::SpecFromConfig(opened->config(), "config.json");
  const std::string layer = models::LayerPrefix(spec.layers - 1);
  for (int e = 0; e < spec.moe.experts; ++e) {
    Scale(source, fmt::format("{}mlp.experts.{}.up_proj", layer, e), 0x1p20F);
    Scale(source, fmt::format("{}mlp.experts.{}.down_proj", layer, e), 0x1p-20F);
  }
  SetMix({"fp16", "bf16"}, MixBudget::Kind::kBitsPerWeight, 32);
  const StatusOr<QuantizeReport> report = Run(source, "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->rounded, 0U);
  for (const PrecisionGroup& unit : report->analysis->mix->units) {
    if (!unit.measured) continue;
    const bool overflows = unit.name == layer + "mlp.experts";
    EXPECT_EQ(unit.options[unit.chosen].precision.Name(), overflows ? "bf16" : "fp16") << unit.name;
    EXPECT_EQ(std::isinf(unit.options[0].loss), overflows) << unit.name;
    EXPECT_EQ(unit.options[0].largest > 65504, overflows) << unit.name;
    EXPECT_GT(unit.options[1].loss, 0) << "bf16's arithmetic is compared with f32";
  }
  const auto out = *Checkpoint::Open(folder_.Path("out"));
  EXPECT_FALSE(out->config().contains("quantization_config"));
  EXPECT_EQ(out->config()["torch_dtype"], "bfloat16") << "the widest of the kept dtypes";
  EXPECT_EQ(out->Find(layer + "mlp.experts.0.up_proj.weight")->dtype, tensor::DType::kBF16);
  EXPECT_EQ(out->Find(layer + "self_attn.o_proj.weight")->dtype, tensor::DType::kF16);
  EXPECT_TRUE(Check(source, "out").ok()) << Check(source, "out").status();
  models::TestModel model(folder_.Path("out"), models::BestIsa(), {});
  EXPECT_TRUE(model.status().ok()) << model.status();
}

TEST_F(MixWalkTest, EverySourceYieldsACompleteFolderWithinItsBudget) {
  for (const char* golden : {"kimi-k2", "deepseek-v3-mtp", "deepseek-v3-fp8", "deepseek-v3-noqlora",
                             "qwen3-moe-norm-tied", "pangu-ultra-moe-mtp", "llama3-rope-bias"}) {
    for (const bool gptq : {false, true}) {
      options_.calibration.clear();
      options_.output = {};
      options_.output.search = options_.output.gptq = gptq;
      SetMix({"w4a16", "w8a8", "w8a16", "fp8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 32);
      const std::string free = fmt::format("{}-{}-free", golden, gptq),
                        out = fmt::format("{}-{}", golden, gptq);
      const StatusOr<QuantizeReport> most = Run(Golden(golden), free);
      ASSERT_TRUE(most.ok()) << golden << " " << most.status();
      // Half way between that and 8 bits for all.
      MixSettings mix = options_.output.mix;
      options_.output.mix = {};
      options_.output.scheme = Scheme::kFp8;
      const StatusOr<QuantizeReport> least = Run(Golden(golden), free + "-least");
      ASSERT_TRUE(least.ok()) << golden << " " << least.status();
      const double budget = 0.5 * static_cast<double>(most->output_bytes + least->output_bytes);
      options_.output.mix = std::move(mix);
      options_.output.mix.budget = {MixBudget::Kind::kBytes, budget};
      const StatusOr<QuantizeReport> report = Run(Golden(golden), out);
      ASSERT_TRUE(report.ok()) << golden << " " << report.status();
      EXPECT_LE(static_cast<double>(report->output_bytes), budget) << golden;
      EXPECT_GT(static_cast<double>(report->output_bytes), 0.85 * budget) << golden;
      EXPECT_GT(report->rounded, 0U);
      const StatusOr<VerifyReport> verified = Check(Golden(golden), out);
      ASSERT_TRUE(verified.ok()) << golden << " " << verified.status();
      EXPECT_EQ(verified->rounded, report->rounded);
      models::TestModel model(folder_.Path(out), models::BestIsa(), {});
      ASSERT_TRUE(model.status().ok()) << golden << " " << model.status();
      for (const RouterFinding& router : report->analysis->mix->routers) {
        EXPECT_GE(router.loss, 0);
        EXPECT_LE(router.flips, 1);
      }
    }
  }
}

TEST_F(MixWalkTest, BytesDoNotDependOnThreadsOrUnits) {
  SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 6);
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "one", 1).ok());
  const auto expected = FilesOf(folder_.Path("one"));
  options_.sizes.unit_bytes = 1;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "three", 3).ok());
  EXPECT_EQ(FilesOf(folder_.Path("three")), expected);
}

TEST_F(MixWalkTest, ResumesAfterEveryInterruption) {
  const std::string source = Golden("deepseek-v3-mtp");
  for (const bool gptq : {false, true}) {
    options_.calibration.clear();
    options_.sizes.unit_bytes = 0;
    options_.progress = nullptr;
    options_.output = {};
    options_.output.search = options_.output.gptq = gptq;
    options_.save_share = 1;
    SetMix({"nvfp4", "fp8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 7);
    const std::string whole = fmt::format("whole-{}", gptq);
    ASSERT_TRUE(Run(source, whole).ok());
    const auto expected = FilesOf(folder_.Path(whole));
    options_.sizes.unit_bytes = 60'000;
    for (int stop = 1;; stop += 2) {
      const std::string out = fmt::format("stopped-{}-{}", gptq, stop);
      int steps = 0, measured = 0;
      std::string last;
      options_.progress = [&](const QuantizeProgress& at) {
        // A slow machine repeats its reports.
        const std::string report = fmt::format("{} {}", at.done, at.stage);
        if (report == std::exchange(last, report)) return true;
        return ++steps != stop;
      };
      const StatusOr<QuantizeReport> first = Run(source, out);
      if (first.ok()) {
        EXPECT_GT(stop, 6);
        break;
      }
      EXPECT_EQ(first.status().code(), StatusCode::kCancelled) << first.status();
      const bool chosen = fs::exists(folder_.Path(out) + "/" + kAnalysisFile);
      const bool saved = chosen || fs::exists(folder_.Path(out) + "/" + kMixStateFile);
      options_.progress = [&](const QuantizeProgress& at) {
        measured += at.stage.starts_with("measuring") ? 1 : 0;
        return true;
      };
      const StatusOr<QuantizeReport> second = Run(source, out);
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_EQ(second->analysis_resumed, saved) << "interrupted after " << stop;
      EXPECT_EQ(measured == 0, chosen) << "a chosen mix is not measured again";
      EXPECT_EQ(FilesOf(folder_.Path(out)), expected) << "interrupted after " << stop;
    }
  }
}

// How often a measurement reports progress depends on its speed.
bool StopsAfterMeasuring(const QuantizeProgress& at) { return at.stage.starts_with("measuring"); }

TEST_F(MixWalkTest, AnotherMixIsRejected) {
  SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 6);
  options_.progress = StopsAfterMeasuring;
  options_.sizes.unit_bytes = 60'000;
  ASSERT_EQ(Run(Golden("kimi-k2"), "out").status().code(), StatusCode::kCancelled);
  options_.progress = nullptr;
  options_.output.mix.budget.amount = 7;
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()), HasSubstr("started with another settings"));
}

// Interrupts the measurement after a state was saved.
TEST_F(MixWalkTest, AMeasurementIsReusedForAnotherBudgetButNotForAnotherMix) {
  options_.save_share = 1;
  options_.output.search = options_.output.gptq = true;
  SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 6);
  const auto stop_in = [](const char* stage) {
    return [stage](const QuantizeProgress& at) { return !at.stage.starts_with(stage); };
  };
  options_.progress = stop_in("measuring layer 5");
  ASSERT_EQ(Run(Golden("kimi-k2"), "out").status().code(), StatusCode::kCancelled);
  const auto files = FilesOf(folder_.Path("out"));
  ASSERT_TRUE(files.contains("analysis-mix.state"));
  const QuantizeOptions begun = options_;
  const auto refused = [&](const std::function<void(QuantizeOptions*)>& change) {
    options_ = begun;
    options_.progress = nullptr;
    change(&options_);
    const Status status = Run(Golden("kimi-k2"), "out").status();
    EXPECT_EQ(FilesOf(folder_.Path("out")), files);
    return std::string(Message(status));
  };
  EXPECT_THAT(
      refused([](QuantizeOptions* o) { std::swap(o->output.mix.options[0], o->output.mix.options[1]); }),
      HasSubstr("analysis-mix.state: was measured with another mix: "));
  EXPECT_THAT(refused([](QuantizeOptions* o) { o->output.mix.tokens = 100; }),
              HasSubstr("measured with another mix_tokens: 195 then, 100 now"));
  EXPECT_THAT(refused([](QuantizeOptions* o) {
                o->output.keep = {{tensor::DType::kBF16, R"(layers\.0\.self_attn)"}};
              }),
              HasSubstr("measured with another keep: [] then, "));
  EXPECT_THAT(refused([](QuantizeOptions* o) { o->output.gptq = false; }),
              HasSubstr(R"(measured with another method: "gptq" then, "mse" now)"));
  EXPECT_THAT(refused([](QuantizeOptions* o) { o->calibration.pop_back(); }),
              HasSubstr("measured with another calibration: "));
  EXPECT_THAT(refused([](QuantizeOptions* o) { o->output.mix = {}; }), HasSubstr("was measured for a mix"));
  EXPECT_THAT(refused([](QuantizeOptions* o) { o->memory = 1; }), HasSubstr("--memory 1 is too little"));
  EXPECT_THAT(refused([](QuantizeOptions* o) { o->output.mix.budget.amount = 1; }),
              HasSubstr("--bits-per-weight 1 is too little"));

  options_ = begun;
  options_.output.mix.budget.amount = 8;
  options_.output.shard_bytes = 60'000;
  std::string first;
  options_.progress = [&](const QuantizeProgress& at) {
    if (first.empty()) first = at.stage;
    return true;
  };
  const StatusOr<QuantizeReport> report = Run(Golden("kimi-k2"), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(first, HasSubstr("measuring layer 5")) << "it resumes";
  options_.progress = nullptr;
  ASSERT_TRUE(Run(Golden("kimi-k2"), "whole").ok());
  EXPECT_EQ(FilesOf(folder_.Path("out")), FilesOf(folder_.Path("whole")));
}

TEST_F(MixWalkTest, OtherKernelsAreRejectedBeforeMeasuring) {
  SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 6);
  options_.progress = StopsAfterMeasuring;
  options_.sizes.unit_bytes = 60'000;
  ASSERT_EQ(Run(Golden("kimi-k2"), "out").status().code(), StatusCode::kCancelled);
  int measured = 0;
  options_.progress = [&](const QuantizeProgress& at) {
    measured += at.stage.starts_with("measuring") ? 1 : 0;
    return true;
  };
  const std::vector<runtime::Isa> isas = runtime::HostIsas(runtime::DetectCpu());
  if (isas.size() < 2) GTEST_SKIP() << "this machine has one kind of kernels";
  kernels_ = kernels::SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isas.front()));
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()), HasSubstr("started with another kernels"));
  EXPECT_EQ(measured, 0);
}

TEST_F(MixWalkTest, RejectsKeepRulesThatSeparateFusedLinears) {
  // If the rest of q, k and v were kept in bf16 as well, the failure could have another cause.
  SetMix({"bf16", "nvfp4"}, MixBudget::Kind::kBitsPerWeight, 32);
  options_.output.keep = {{tensor::DType::kF32, R"(layers\.1\.self_attn\.q_proj)"}};
  bool measured = false;
  options_.progress = [&](const QuantizeProgress&) { return measured = true; };
  const std::string message = Message(Run(Golden("qwen3-moe-norm-tied"), "out").status());
  EXPECT_THAT(message, HasSubstr("it names only one of model.layers.1.self_attn.q_proj and "));
  EXPECT_FALSE(measured);
}

TEST_F(MixWalkTest, VerifyRejectsAnotherModel) {
  SetMix({"nvfp4", "w8a8"}, MixBudget::Kind::kBitsPerWeight, 8);
  ASSERT_TRUE(Run(Golden("kimi-k2"), "out").ok());
  EXPECT_THAT(Message(Check(Golden("qwen3-moe-norm-tied"), "out").status()),
              HasSubstr("the chosen mix has no precision for it; the mix was made for another model"));
}

TEST_F(MixWalkTest, MtpModulesTakeTheFewestBytes) {
  SetMix({"bf16", "w8a8", "nvfp4"}, MixBudget::Kind::kBytes, 1e12);
  const StatusOr<QuantizeReport> report = Run(Golden("deepseek-v3-mtp"), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  int drafting = 0;
  for (const PrecisionGroup& unit : report->analysis->mix->units) {
    drafting += unit.measured ? 0 : 1;
    const MixOption& chosen = unit.options[unit.chosen];
    const int64_t fewest = std::ranges::min(unit.options, {}, &MixOption::bytes).bytes;
    EXPECT_TRUE(unit.measured ? chosen.precision.Name() == "bf16" : chosen.bytes == fewest)
        << unit.name << " " << chosen.precision.Name();
  }
  EXPECT_GT(drafting, 0);
}

TEST_F(MixWalkTest, SampleTakesFurtherWindowsUntilItHasEnoughTokens) {
  const std::vector<std::vector<int32_t>> sequences = TestSequences({600, 100, 300}, 1000);
  const auto lengths = [&](int64_t tokens) {
    std::vector<size_t> found;
    for (const std::vector<int32_t>& window : MixSample(sequences, tokens)) found.push_back(window.size());
    return found;
  };
  EXPECT_THAT(lengths(300), ElementsAre(256, 44));
  EXPECT_THAT(lengths(700), ElementsAre(256, 100, 256, 88));
  EXPECT_THAT(lengths(5000), ElementsAre(256, 100, 256, 256, 44, 88));
  EXPECT_EQ(MixSample(sequences, 5000)[3],
            std::vector<int32_t>(sequences[0].begin() + 256, sequences[0].begin() + 512));
  options_.calibration = sequences;
  for (std::vector<int32_t>& ids : options_.calibration) {
    for (int32_t& id : ids) id %= 64;
  }
  SetMix({"nvfp4", "w8a8"}, MixBudget::Kind::kBitsPerWeight, 6);
  options_.output.mix.tokens = 2048;
  const StatusOr<QuantizeReport> report = Run(Golden("kimi-k2"), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->analysis->mix->tokens, 1000);
}

TEST_F(MixWalkTest, PlansForAtMostTheAvailableTokens) {
  const auto source = *Checkpoint::Open(Golden("kimi-k2"));
  const models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
  const std::vector<ModelItem> items = *ListItems(*source);
  SetMix({"fp16", "fp32"}, MixBudget::Kind::kBitsPerWeight, 32);
  options_.output.calibration.tokens = 100;
  const auto bytes = [&] {
    return PlanMixPasses(spec, items, options_.output, {}, int64_t{1} << 40)->front().bytes;
  };
  const int64_t of_hundred = bytes();
  options_.output.mix.tokens = 100'000;
  EXPECT_EQ(bytes(), of_hundred) << "100 are available";
  options_.output.calibration.tokens = 101;
  EXPECT_GT(bytes(), of_hundred);
}

// With less memory there are more passes. Each fits its limit, and together they cover all layers. If the
// memory is too little for some layer, the error states the needed size: it suffices, and one byte less does
// not.
TEST_F(MixWalkTest, PassesFitTheirMemory) {
  const auto source = *Checkpoint::Open(models::SourcePath("models/moesaic-tiny"));
  const models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
  const std::vector<ModelItem> items = *ListItems(*source);
  SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 6);
  options_.output.mix.tokens = options_.output.calibration.tokens = 2048;
  int64_t memory = PlanMixPasses(spec, items, options_.output, {}, int64_t{1} << 40)->front().bytes;
  size_t most = 1;
  for (;; memory -= memory / 20) {
    const auto passes = PlanMixPasses(spec, items, options_.output, {}, memory);
    if (!passes.ok()) {
      const std::string message(Message(passes.status()));
      EXPECT_THAT(message, AllOf(HasSubstr("measuring the mix in layer "),
                                 HasSubstr(" variants of 2048 tokens (fewer --mix-tokens")));
      const int64_t needed = std::stoll(message.substr(message.find(" takes ") + 7));
      EXPECT_GT(needed, memory);
      EXPECT_TRUE(PlanMixPasses(spec, items, options_.output, {}, needed).ok());
      EXPECT_FALSE(PlanMixPasses(spec, items, options_.output, {}, needed - 1).ok());
      EXPECT_THAT(Message(PlanMixPasses(spec, items, options_.output, {}, 0).status()),
                  AllOf(HasSubstr(fmt::format(" takes {} bytes", needed)), Not(HasSubstr("fewer"))));
      break;
    }
    EXPECT_GE(passes->size(), most);
    most = passes->size();
    int end = 0;
    for (const MixPass& pass : *passes) {
      EXPECT_EQ(pass.first, end);
      EXPECT_GT(pass.end, pass.first);
      EXPECT_LE(pass.bytes, memory);
      end = pass.end;
    }
    EXPECT_EQ(end, spec.layers);
  }
  EXPECT_GT(most, 2U);
}

// Computes KL(first variant || variant) by variant in double, from its definition. *error becomes the
// possible f32 error of a logit.
std::vector<double> PlainLosses(const kernels::ExecContext& ctx, const Checkpoint& source,
                                const models::DecoderSpec& spec, CalibrationStream& stream, double* error) {
  const int hidden = spec.hidden, vocab = spec.vocab, tokens = stream.variant_tokens();
  const int64_t shape[] = {hidden};
  const std::vector<float> norm = *source.ReadF32(models::kFinalNorm, shape);
  const std::string module = spec.tied ? models::kEmbedding : models::kHead;
  const std::vector<float> head = *ReadRows(ctx, source, module, vocab, hidden, 0, vocab);
  double products = 0;
  const auto predict = [&](int variant, int token) {  // returns log-probabilities
    const float* x = stream.hidden() + (int64_t{variant} * tokens + token) * hidden;
    double squares = 0, sum = 0;
    for (int d = 0; d < hidden; ++d) squares += double{x[d]} * x[d];
    const double scale = 1 / std::sqrt(squares / hidden + spec.norm_eps);
    std::vector<double> logits(static_cast<size_t>(vocab));
    for (int v = 0; v < vocab; ++v) {
      double absolute = 0;
      for (int d = 0; d < hidden; ++d) {
        const double product = x[d] * scale * norm[d] * head[int64_t{v} * hidden + d];
        logits[v] += product;
        absolute += std::abs(product);
      }
      products = std::max(products, absolute);
      sum += std::exp(logits[v]);
    }
    for (double& logit : logits) logit -= std::log(sum);
    return logits;
  };
  std::vector<double> losses(static_cast<size_t>(stream.variants()));
  for (int token = 0; token < tokens; ++token) {
    const std::vector<double> p = predict(0, token);
    for (int variant = 1; variant < stream.variants(); ++variant) {
      const std::vector<double> q = predict(variant, token);
      for (int v = 0; v < vocab; ++v) losses[variant] += std::exp(p[v]) * (p[v] - q[v]) / tokens;
    }
  }
  // Roundings: one per product, their sum, and the norm's mean, root and two products.
  *error = (2.0 * hidden + 8) * products * 0x1p-24;
  return losses;
}

// The sums over parts of the head equal those over the whole, and follow the definition.
TEST_F(MixWalkTest, LossesDoNotDependOnPartsOfTheHead) {
  const auto source = *Checkpoint::Open(Golden("qwen3-moe-norm-tied"));
  const models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels_, .pool = pool.get(), .scratch = &scratch};
  models::DecoderSpec tiny = spec;
  tiny.vocab = 5;
  EXPECT_EQ(VariantLossRows(tiny), 5);
  CalibrationStream stream =
      *CalibrationStream::Create(*source, spec, TestSequences({70, 9}, spec.vocab), ctx);
  ASSERT_TRUE(stream.ReserveVariants(3).ok());
  const int64_t values = int64_t{stream.variant_tokens()} * spec.hidden;
  for (const float noise : {0.01F, 0.5F}) {
    const int variant = stream.AddVariant();
    for (int64_t i = 0; i < values; ++i) {
      float& x = stream.hidden()[variant * values + i];
      x *= 1 + noise * std::sin(static_cast<float>(7 * i));
    }
  }
  const auto whole = *VariantLosses(ctx, *source, spec, tensor::DType::kF32, spec.vocab, stream);
  EXPECT_EQ(whole[0], 0);
  EXPECT_GT(whole[1], 0);
  EXPECT_GT(whole[2], 10 * whole[1]);
  double error = 0;
  const std::vector<double> plain = PlainLosses(ctx, *source, spec, stream, &error);
  for (size_t variant = 1; variant < whole.size(); ++variant) {
    // The sum of |dKL/dq| is at most sqrt(2 KL) and that of |dKL/dp| at most 2 KL + sqrt(2 KL) (Pinsker).
    // Squares of errors are added.
    const double slope = 2 * (std::sqrt(2 * plain[variant]) + plain[variant]);
    EXPECT_NEAR(whole[variant], plain[variant], slope * error + 4 * error * error) << "variant " << variant;
  }
  for (const int rows : {16, 48}) {
    const auto parts = *VariantLosses(ctx, *source, spec, tensor::DType::kF32, rows, stream);
    // Logits are equal; sums of doubles have another order, and logits differ by about 10.
    for (size_t variant = 0; variant < whole.size(); ++variant)
      EXPECT_NEAR(parts[variant], whole[variant], 1e-12);
  }
}

// One pass per layer and one pass for all layers find the same, because variants are independent.
TEST_F(MixWalkTest, LossesDoNotDependOnPasses) {
  for (const char* golden : {"kimi-k2", "qwen3-moe-norm-tied", "deepseek-v3-mtp"}) {
    const auto source = *Checkpoint::Open(Golden(golden));
    const models::DecoderSpec spec = *models::SpecFromConfig(source->config(), "config.json");
    const std::vector<ModelItem> items = *ListItems(*source);
    const auto forms = *FormsOf(*source, items);
    options_.output = {};
    SetMix({"nvfp4", "w8a8", "bf16"}, MixBudget::Kind::kBitsPerWeight, 16);
    const std::vector<std::vector<int32_t>> sequences =
        TestSequences({100, 60, 35}, source->config()["vocab_size"]);
    options_.output.calibration = CalibrationId::Of(sequences);
    const MixPlan plan = *PlanMix(items, forms, spec, options_.output);
    std::vector<MixPass> one = *PlanMixPasses(spec, items, options_.output, {}, int64_t{1} << 40), each;
    ASSERT_EQ(one.size(), 1U);
    for (int layer = 0; layer < spec.layers; ++layer) {
      each.push_back({.first = layer, .end = layer + 1, .variants = one[0].variants, .bytes = 0});
    }
    const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
    runtime::Arena scratch;
    const kernels::ExecContext ctx{.kernels = &kernels_, .pool = pool.get(), .scratch = &scratch};
    int last = -1, total = 0;
    const auto progress = [&](int done, int of) {
      EXPECT_TRUE(done == last + 1 || done == last) << "layers in order, each once or more often";
      last = done;
      total = of;
      return true;
    };
    const Mix together =
        *MeasureMix(ctx, *source, spec, items, options_.output, one, plan.units, sequences, {});
    const Mix apart =
        *MeasureMix(ctx, *source, spec, items, options_.output, each, plan.units, sequences, {progress});
    EXPECT_EQ(last + 1, total);
    EXPECT_EQ(total, spec.layers * (spec.layers + 1) / 2);
    ASSERT_EQ(apart.units.size(), together.units.size());
    EXPECT_EQ(apart.tokens, together.tokens);
    for (size_t u = 0; u < apart.units.size(); ++u) {
      EXPECT_EQ(apart.units[u].name, together.units[u].name);
      for (size_t o = 0; o < apart.units[u].options.size(); ++o) {
        EXPECT_EQ(apart.units[u].options[o].loss, together.units[u].options[o].loss) << apart.units[u].name;
        EXPECT_EQ(apart.units[u].options[o].flips, together.units[u].options[o].flips);
      }
    }
    ASSERT_EQ(apart.routers.size(), together.routers.size());
    for (size_t r = 0; r < apart.routers.size(); ++r) {
      EXPECT_EQ(apart.routers[r].layer, together.routers[r].layer);
      EXPECT_EQ(apart.routers[r].loss, together.routers[r].loss);
      EXPECT_EQ(apart.routers[r].flips, together.routers[r].flips);
    }
  }
}

TEST_F(MixWalkTest, ErrorNamesAWeightBeyondFp16) {
  const std::string source = CopyOf("kimi-k2"), module = "model.layers.0.self_attn.o_proj";
  Scale(source, module, 0x1p40F);
  options_.output.keep = {{tensor::DType::kF16, R"(layers\.0\.self_attn\.o_proj)"}};
  EXPECT_THAT(
      Message(Run(source, "out").status()),
      AllOf(HasSubstr(module + ": the weight of output 0, input "), HasSubstr("at most 65504 to be fp16")));
}

TEST_F(MixWalkTest, KeptLinearsAreNotPartOfTheMix) {
  SetMix({"nvfp4", "w8a8"}, MixBudget::Kind::kBitsPerWeight, 8);
  options_.output.keep = {{tensor::DType::kF32, R"(layers\.1\.)"}};
  const StatusOr<QuantizeReport> report = Run(Golden("kimi-k2"), "out");
  ASSERT_TRUE(report.ok()) << report.status();
  for (const PrecisionGroup& unit : report->analysis->mix->units) EXPECT_NE(unit.layer, 1) << unit.name;
  const auto out = *Checkpoint::Open(folder_.Path("out"));
  EXPECT_EQ(out->Find("model.layers.1.self_attn.o_proj.weight")->dtype, tensor::DType::kF32);
  EXPECT_TRUE(Check(Golden("kimi-k2"), "out").ok());
}

TEST_F(MixWalkTest, RejectsSmoothing) {
  SetMix({"nvfp4", "w8a8"}, MixBudget::Kind::kBitsPerWeight, 8);
  options_.output.analyze.smoothing = true;
  EXPECT_THAT(Message(Run(Golden("kimi-k2"), "out").status()), HasSubstr("excludes smoothing"));
  EXPECT_FALSE(fs::exists(folder_.Path("out")));
}

}  // namespace
}  // namespace moesaic::quantizer
