// Carves a tiny Llama and checks the result, its invariants and its errors.
#include "carve/carve.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "carve/carve_plan.h"
#include "checkpoint/safetensors_writer.h"
#include "kernels/kernel_table.h"
#include "models/test_session.h"
#include "quantizer/calibrate/calibration_tokens.h"

namespace moesaic::carve {
namespace {

using models::SourcePath;
using models::TestModel;
using testing::HasSubstr;

constexpr char kDense[] = "tests/golden/llama-untied-f16";  // 96 neurons, hidden 64, vocabulary 160

class CarveTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "carve_" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static std::vector<std::vector<int32_t>> Text() {
    std::vector<std::vector<int32_t>> sequences;
    uint32_t state = 1;
    for (int i = 0; i < 12; ++i) {
      sequences.emplace_back(40 + i);
      for (int32_t& id : sequences.back())
        id = static_cast<int32_t>((state = state * 1664525 + 1013904223) >> 16) % 160;
    }
    return sequences;
  }

  StatusOr<std::vector<CarveLayerReport>> Run(const std::string& dense, const CarveOptions& options,
                                              const std::string& out) {
    const auto source = checkpoint::Checkpoint::Open(dense);
    if (!source.ok()) return source.status();
    const auto kernels = kernels::SelectKernels(runtime::DetectCpu());
    const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
    return Carve(**source, Text(), options, kernels, *pool, out);
  }

  std::string Bytes(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // Writes a copy of kDense with another config, and returns its folder.
  std::string DenseWith(const char* patch) const {
    std::string folder = folder_ + "/dense";
    std::filesystem::create_directories(folder);
    std::filesystem::copy_file(SourcePath(kDense) + "/model.safetensors", folder + "/model.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    std::ifstream file(SourcePath(kDense) + "/config.json");
    nlohmann::json config = nlohmann::json::parse(file);
    config.merge_patch(nlohmann::json::parse(patch));
    std::ofstream(folder + "/config.json") << config;
    return folder;
  }

  static layers::RopeSpec RopeOf(const std::string& path) {
    const auto source = checkpoint::Checkpoint::Open(path);
    EXPECT_TRUE(source.ok()) << Message(source.status());
    const auto spec = models::SpecFromConfig((*source)->config(), "config.json");
    EXPECT_TRUE(spec.ok()) << Message(spec.status());
    return spec.ok() ? spec->rope : layers::RopeSpec();
  }

  static void ExpectEqualModels(const std::string& dense_path, const std::string& carved_path) {
    // The router's weights are 2 sigmoid(1e-4 score) = 1 + 5e-5 score, with scores up to about 10.
    const std::vector<float> dense = Logits(dense_path), carved = Logits(carved_path);
    float largest = 0;
    for (const float v : dense) largest = std::max(largest, std::fabs(v));
    EXPECT_LT(models::MaxDiff(dense, carved), 1e-3F * largest);
  }

  // Returns all logits of one prompt.
  static std::vector<float> Logits(const std::string& path) {
    TestModel model(path, models::BestIsa(), {.dtype = "f32"});
    EXPECT_TRUE(model.status().ok()) << Message(model.status());
    if (!model.status().ok()) return {};
    std::vector<int32_t> ids(70), rows(70);
    for (int i = 0; i < 70; ++i) ids[i] = (i * 37 + 11) % 160;
    std::iota(rows.begin(), rows.end(), 0);
    const models::TestCache cache(model->info().kv, 1, 70);
    return models::Feed(model, cache, 0, 0, ids, rows).logits;
  }

  std::string WriteCalibration(const std::vector<int64_t>& shape, const std::vector<int32_t>& ids,
                               const std::string& name = "tokens") {
    std::filesystem::create_directories(folder_);
    std::string path = folder_ + "/calibration.safetensors";
    const auto status = checkpoint::WriteSafetensors(
        path, {checkpoint::HeldTensor(name, tensor::DType::kI32, shape, std::as_bytes(std::span(ids)))}, {});
    EXPECT_TRUE(status.ok()) << Message(status);
    return path;
  }

  std::string folder_;
};

std::string Error(const auto& result) { return result.ok() ? "" : std::string(Message(result.status())); }

TEST_F(CarveTest, ComputesTheDenseModelWithoutRefitAndWithAllExperts) {
  const auto reports =
      Run(SourcePath(kDense), {.slices = 6, .shared = 2, .active = 4, .refit = false, .f32 = true}, folder_);
  ASSERT_TRUE(reports.ok()) << Error(reports);
  for (const CarveLayerReport& report : *reports) {
    EXPECT_NEAR(report.kept_energy, 1, 1e-5);
    EXPECT_LT(report.error_after, 1e-5);
  }
  ExpectEqualModels(SourcePath(kDense), folder_);
}

TEST_F(CarveTest, KeepsTheRopeScaling) {
  const CarveOptions exact{.slices = 6, .shared = 2, .active = 4, .refit = false, .f32 = true};
  for (const char* patch :
       {R"({"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}})",
        R"({"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50000.0}})",
        R"({"rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 16, "beta_slow": 2,
            "original_max_position_embeddings": 64}})",
        R"({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7, "mscale_all_dim": 0.3}})"}) {
    SCOPED_TRACE(patch);
    const std::string dense = DenseWith(patch), out = folder_ + "/out";
    const auto reports = Run(dense, exact, out);
    ASSERT_TRUE(reports.ok()) << Error(reports);
    const layers::RopeSpec expected = RopeOf(dense), found = RopeOf(out);
    EXPECT_NE(expected.scaling, layers::RopeSpec::Scaling::kNone);
    EXPECT_EQ(found.dim, expected.dim);
    EXPECT_EQ(found.theta, expected.theta);
    EXPECT_EQ(found.scaling, expected.scaling);
    EXPECT_EQ(found.factor, expected.factor);
    EXPECT_EQ(found.original_context, expected.original_context);
    EXPECT_EQ(found.attention_factor, expected.attention_factor);
    EXPECT_TRUE(found == expected);
    ExpectEqualModels(dense, out);
  }
}

// Every weight is an e4m3 number times a power of two, so that both files hold the same numbers.
TEST_F(CarveTest, QuantizedSourcesGiveTheModelOfTheirNumbers) {
  constexpr int kBlock = 32;
  const auto source = *checkpoint::Checkpoint::Open(SourcePath(kDense));
  std::vector<checkpoint::TensorOutput> plain, blocks, channels;
  uint32_t state = 5;
  const auto draw = [&state](uint32_t below) {
    return ((state = state * 1664525 + 1013904223) >> 16) % below;
  };
  for (const checkpoint::TensorEntry& entry : source->tensors()) {
    if (entry.name.find("_proj.") == std::string::npos) {
      for (auto* tensors : {&plain, &blocks, &channels})
        tensors->push_back(checkpoint::HeldTensor(entry.name, entry.dtype, entry.shape, entry.bytes));
      continue;
    }
    const int64_t rows = entry.shape[0], columns = entry.shape[1];
    const int64_t across = (columns + kBlock - 1) / kBlock, down = (rows + kBlock - 1) / kBlock;
    // With equal scales in a row of blocks, the same scales serve blocks and channels.
    std::vector<float> scale_of(down), block_scales, row_scales;
    for (float& scale : scale_of) scale = std::ldexp(1.0F, -4 - static_cast<int>(draw(4)));
    for (int64_t b = 0; b < down; ++b) block_scales.insert(block_scales.end(), across, scale_of[b]);
    std::vector<uint8_t> codes(rows * columns);
    std::vector<float> values(codes.size());
    for (int64_t row = 0; row < rows; ++row) {
      row_scales.push_back(scale_of[row / kBlock]);
      for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
        codes[i] = static_cast<uint8_t>(draw(2) * 0x80 + draw(0x40));  // within +-1.875
        values[i] = tensor::F8E4M3ToFloat(codes[i]) * row_scales.back();
      }
    }
    const auto add = [&](auto& tensors, const std::string& name, tensor::DType dtype,
                         const std::vector<int64_t>& shape, const auto& data) {
      tensors.push_back(checkpoint::HeldTensor(name, dtype, shape, std::as_bytes(std::span(data))));
    };
    add(plain, entry.name, tensor::DType::kF32, entry.shape, values);
    add(blocks, entry.name, tensor::DType::kF8E4M3, entry.shape, codes);
    add(blocks, entry.name + "_scale_inv", tensor::DType::kF32, {down, across}, block_scales);
    add(channels, entry.name, tensor::DType::kF8E4M3, entry.shape, codes);
    add(channels, entry.name + "_scale", tensor::DType::kF32, {rows, 1}, row_scales);
  }
  const CarveOptions options{.slices = 6, .shared = 2, .active = 3, .f32 = true};
  const auto carve = [&](const std::string& name, const char* patch, const auto& tensors) {
    const std::string dense = DenseWith(patch);
    const Status written = checkpoint::WriteSafetensors(dense + "/model.safetensors", tensors, {});
    EXPECT_TRUE(written.ok()) << Message(written);
    const auto reports = Run(dense, options, folder_ + "/" + name);
    EXPECT_TRUE(reports.ok()) << name << ": " << Error(reports);
    return Bytes(name + "/model.safetensors");
  };
  const std::string expected = carve("plain", "{}", plain);
  ASSERT_FALSE(expected.empty());
  EXPECT_TRUE(carve("blocks", R"({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                  "activation_scheme": "dynamic", "weight_block_size": [32, 32]}})",
                    blocks) == expected);
  EXPECT_TRUE(carve("channels", R"({"quantization_config": {"quant_method": "compressed-tensors",
      "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"],
      "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}}}}})",
                    channels) == expected);
}

TEST_F(CarveTest, RefitLowersTheErrorAndIsDeterministic) {
  const CarveOptions options{.slices = 12, .shared = 3, .active = 6, .ridge = 0.01F, .f32 = true};
  const auto reports = Run(SourcePath(kDense), options, folder_ + "/a");
  ASSERT_TRUE(reports.ok()) << Error(reports);
  for (const CarveLayerReport& report : *reports) {
    EXPECT_GT(report.error_before, 0);
    EXPECT_LT(report.error_after, report.error_before);
    EXPECT_LT(report.kept_energy, 1);
    EXPECT_GT(report.kept_energy, 0.75);  // 9 of 12 slices, the best ones
  }
  ASSERT_TRUE(Run(SourcePath(kDense), options, folder_ + "/b").ok());
  EXPECT_TRUE(Bytes("a/model.safetensors") == Bytes("b/model.safetensors"));
  EXPECT_EQ(Logits(folder_ + "/a").size(), 70U * 160);
}

TEST_F(CarveTest, PlanReproducesTheSearch) {
  std::filesystem::create_directories(folder_);
  CarveOptions options{
      .slices = 12, .shared = 3, .active = 6, .f32 = true, .save_plan = folder_ + "/plan.safetensors"};
  ASSERT_TRUE(Run(SourcePath(kDense), options, folder_ + "/searched").ok());
  options.plan = std::exchange(options.save_plan, folder_ + "/plan2.safetensors");
  const auto reports = Run(SourcePath(kDense), options, folder_ + "/given");
  ASSERT_TRUE(reports.ok()) << Error(reports);
  EXPECT_TRUE(Bytes("searched/model.safetensors") == Bytes("given/model.safetensors"));
  EXPECT_TRUE(Bytes("plan.safetensors") == Bytes("plan2.safetensors"));

  options.slices = 6, options.active = 3;
  EXPECT_THAT(Error(Run(SourcePath(kDense), options, folder_ + "/other")),
              HasSubstr("was made for --slices 12 --shared 3 --active 6, "
                        "found --slices 6 --shared 3 --active 3"));
}

TEST_F(CarveTest, FailsBeforeTheWorkIfThePlanCannotBeWritten) {
  CarveOptions options{
      .slices = 6, .shared = 2, .active = 3, .save_plan = folder_ + "/missing/plan.safetensors"};
  options.progress = [](int, int) {
    ADD_FAILURE() << "it started";
    return true;
  };
  EXPECT_THAT(Error(Run(SourcePath(kDense), options, folder_ + "/out")), HasSubstr("can't be written"));
}

class CarvePlanTest : public CarveTest {
 protected:
  static constexpr int kWidth = 96, kHidden = 64, kSlice = 16, kRouted = 4;

  CarvePlanTest() { plans_.assign(3, Evenly(kSlice, kWidth, kHidden)); }
  void SetUp() override {
    CarveTest::SetUp();
    std::filesystem::create_directories(folder_);
    options_.plan = folder_ + "/given.safetensors";
  }

  // Assigns the first neurons to the experts in order and the others to the shared expert. The router scores
  // all experts equally.
  static LayerPlan Evenly(int slice, int width, int hidden) {
    LayerPlan plan{
        .shared = {},
        .experts = std::vector<std::vector<int>>(kRouted),
        .router = {.weights = RowMatrix::Zero(kRouted, hidden), .bias = std::vector<float>(kRouted)}};
    for (int j = 0; j < width; ++j)
      (j < kRouted * slice ? plan.experts[j / slice] : plan.shared).push_back(j);
    return plan;
  }

  std::string Carve() {
    EXPECT_TRUE(WriteCarvePlan(options_.plan, options_, plans_).ok());
    return Error(Run(SourcePath(kDense), options_, folder_ + "/out"));
  }

  CarveOptions options_{.slices = 6, .shared = 2, .active = 3};
  std::vector<LayerPlan> plans_;
};

TEST_F(CarvePlanTest, ResultUsesTheGivenPlan) {
  options_.save_plan = folder_ + "/used.safetensors";
  ASSERT_EQ(Carve(), "");
  EXPECT_TRUE(Bytes("given.safetensors") == Bytes("used.safetensors"));
  const auto file = *checkpoint::Checkpoint::Open(folder_ + "/out");
  const auto source = *checkpoint::Checkpoint::Open(SourcePath(kDense));
  std::vector<float> moved(kHidden), dense(kHidden);
  for (int e = 0; e < kRouted; ++e) {
    const auto* expert = file->Find("model.layers.1.mlp.experts." + std::to_string(e) + ".gate_proj.weight");
    ASSERT_TRUE(file->ReadRows(*expert, 2, 1, moved).ok());
    ASSERT_TRUE(
        source->ReadRows(*source->Find("model.layers.1.mlp.gate_proj.weight"), e * kSlice + 2, 1, dense)
            .ok());
    EXPECT_LT(models::MaxDiff(moved, dense), 1e-2F);
  }
}

TEST_F(CarvePlanTest, RejectsPlansOfOtherOptionsOrShapes) {
  const auto with = [this](int slice, int width, int hidden) {
    plans_[0] = Evenly(slice, width, hidden);
    return Carve();
  };
  EXPECT_THAT(with(15, kWidth, kHidden),
              HasSubstr("must give each expert 16 neurons, found 15 for expert 0"));
  EXPECT_THAT(with(kSlice, 80, kHidden), HasSubstr("layers.0.expert"));
  EXPECT_THAT(with(kSlice, kWidth, 32), HasSubstr("layers.0.router.weight"));
  EXPECT_EQ(with(kSlice, kWidth, kHidden), "");
  LayerPlan& one_more = plans_[0];
  one_more.experts.push_back({one_more.shared.back()});
  one_more.shared.pop_back();
  one_more.router = {.weights = RowMatrix::Zero(kRouted + 1, kHidden),
                     .bias = std::vector<float>(kRouted + 1)};
  EXPECT_THAT(Carve(), HasSubstr("layers.0.expert[95] must be in [-1, 4), found 4"));
  plans_[0] = Evenly(kSlice, kWidth, kHidden);
  plans_.push_back(plans_[0]);
  EXPECT_THAT(Carve(), HasSubstr("has 13 tensors, but a plan of 3 layers has 10"));
  plans_.resize(2);
  EXPECT_THAT(Carve(), HasSubstr("layers.2.expert"));
}

TEST_F(CarvePlanTest, RejectsNonFiniteRouters) {
  plans_[1].router.bias[2] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(Carve(), HasSubstr("layers.1.router.bias must lie within +-1000, found inf"));
  plans_[0].router.weights(1, 1) = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(Carve(), HasSubstr("layers.0.router.weight must lie within +-1000, found nan"));
  plans_[0].router.weights(1, 1) = 1e5F;
  EXPECT_THAT(Carve(), HasSubstr("found 100000"));
}

TEST_F(CarveTest, StopsWhenProgressReturnsFalse) {
  CarveOptions options{.slices = 6, .shared = 2, .active = 3};
  int calls = 0;
  options.progress = [&calls](int layer, int layers) {
    EXPECT_EQ(layers, 3);
    ++calls;
    return layer < 2;
  };
  EXPECT_THAT(Error(Run(SourcePath(kDense), options, folder_)), HasSubstr("carving was interrupted"));
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/model.safetensors"));
}

TEST_F(CarveTest, RejectsModelsThatAreNotLlamaLike) {
  EXPECT_THAT(Error(Run(SourcePath("tests/golden/qwen3-moe-norm-tied"), {}, folder_)),
              HasSubstr("LlamaForCausalLM"));
  EXPECT_THAT(Error(Run(SourcePath("tests/golden/llama3-rope-bias"), {}, folder_)), HasSubstr("biases"));
}

TEST_F(CarveTest, RejectsSlicesThatDoNotFit) {
  EXPECT_THAT(Error(Run(SourcePath(kDense), {.slices = 7}, folder_)),
              HasSubstr("divide the FFN's 96 neurons"));
  EXPECT_THAT(Error(Run(SourcePath(kDense), {.slices = 6, .shared = 6}, folder_)), HasSubstr("--shared"));
  EXPECT_THAT(Error(Run(SourcePath(kDense), {.slices = 6, .shared = 2, .active = 5}, folder_)),
              HasSubstr("--active must be in [1, 4], found 5"));
}

TEST_F(CarveTest, ReadsCalibrationTokensUpToTheirPadding) {
  const std::string path = WriteCalibration({3, 4}, {1, 2, 3, -1, 4, 5, 6, 7, 8, 9, -1, -1});
  const auto all = quantizer::ReadCalibrationTokens(path, 10, 100);
  ASSERT_TRUE(all.ok()) << Error(all);
  EXPECT_EQ(*all, (std::vector<std::vector<int32_t>>{{1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));
  const auto some = quantizer::ReadCalibrationTokens(path, 10, 8);
  ASSERT_TRUE(some.ok());
  EXPECT_EQ(some->size(), 2U);
}

TEST_F(CarveTest, RejectsBadCalibrationTokens) {
  const auto error = [](const std::string& path) {
    return Error(quantizer::ReadCalibrationTokens(path, 10, 100));
  };
  EXPECT_THAT(error(folder_ + "/none.safetensors"), HasSubstr("none.safetensors"));
  EXPECT_THAT(error(WriteCalibration({1, 3}, {1, 10, 2})),
              HasSubstr("token ids must be in [0, 10), found 10"));
  EXPECT_THAT(error(WriteCalibration({1, 3}, {1, -1, 2})), HasSubstr("found -1"));
  EXPECT_THAT(error(WriteCalibration({2, 2}, {1, 2, -1, -1})), HasSubstr("sequence 1 is empty"));
  EXPECT_THAT(error(WriteCalibration({3}, {1, 2, 3})), HasSubstr("shape [sequences, length]"));
  EXPECT_THAT(error(WriteCalibration({1, 3}, {1, 2, 3}, "ids")), HasSubstr("\"tokens\""));
  EXPECT_THAT(Error(quantizer::ReadCalibrationTokens(WriteCalibration({1, 3}, {1, 2, 3}), 10, 2)),
              HasSubstr("longer than 2 tokens"));
}

}  // namespace
}  // namespace moesaic::carve
