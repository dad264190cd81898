// Compares the same weights as a Hub folder and as GGUF files written by llama.cpp's converter.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"

namespace moesaic::checkpoint {
namespace {

std::string Refs() { return std::string(MOESAIC_SOURCE_DIR) + "/../shared/data/refs/"; }

// Reads in uneven pieces, so that pieces begin and end within heads.
std::vector<float> ReadInPieces(const Checkpoint& checkpoint, const TensorEntry& entry) {
  const int64_t columns = entry.shape.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < entry.shape.size(); ++i) rows *= entry.shape[i];
  std::vector<float> values(static_cast<size_t>(rows * columns));
  int64_t piece = 1;
  for (int64_t row = 0; row < rows; row += piece, piece = piece % 13 + 3) {
    const int64_t count = std::min(piece, rows - row);
    const auto out = std::span(values).subspan(static_cast<size_t>(row * columns));
    EXPECT_TRUE(checkpoint.ReadRows(entry, row, count, out).ok());
  }
  return values;
}

class GgufRefsTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(Refs())) GTEST_SKIP() << Refs() << " is missing";
    hub_ = *Checkpoint::Open(Refs() + GetParam());
  }
  std::unique_ptr<Checkpoint> Gguf(const std::string& type) {
    auto gguf = Checkpoint::Open(Refs() + "gguf/" + GetParam() + "-" + type + ".gguf");
    EXPECT_TRUE(gguf.ok()) << Message(gguf.status());
    return gguf.ok() ? *std::move(gguf) : nullptr;
  }
  std::unique_ptr<Checkpoint> hub_;
};

TEST_P(GgufRefsTest, F32TensorsEqualThoseOfTheHubBitForBit) {
  const auto gguf = Gguf("f32");
  ASSERT_NE(gguf, nullptr);
  ASSERT_EQ(gguf->tensors().size(), hub_->tensors().size());
  for (const TensorEntry& entry : hub_->tensors()) {
    const TensorEntry* found = gguf->Find(entry.name);
    ASSERT_NE(found, nullptr) << entry.name;
    EXPECT_EQ(found->shape, entry.shape) << entry.name;
    EXPECT_EQ(found->dtype, tensor::DType::kF32);
    EXPECT_EQ(ReadInPieces(*gguf, *found), ReadInPieces(*hub_, entry)) << entry.name;
  }
}

// Q8_0 has an error of half a step, 1/127 of the largest magnitude in the block, plus the f16 rounding of the
// step.
TEST_P(GgufRefsTest, Q8TensorsAreNearThoseOfTheHub) {
  const auto gguf = Gguf("q8_0");
  ASSERT_NE(gguf, nullptr);
  int quantised = 0;
  for (const TensorEntry& entry : hub_->tensors()) {
    const TensorEntry* found = gguf->Find(entry.name);
    ASSERT_NE(found, nullptr) << entry.name;
    quantised += found->dtype == tensor::DType::kQ8_0 ? 1 : 0;
    const std::vector<float> values = ReadInPieces(*gguf, *found), expected = ReadInPieces(*hub_, entry);
    float largest = 0;
    for (const float value : expected) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], expected[i], largest * (0.5F / 127 + 0x1p-11F)) << entry.name << " " << i;
    }
  }
  EXPECT_GT(quantised, 0);
}

TEST_P(GgufRefsTest, ConfigEqualsThatOfTheHub) {
  const auto gguf = Gguf("f32");
  ASSERT_NE(gguf, nullptr);
  nlohmann::json expected = hub_->config(), config = gguf->config();
  if (config.contains("rope_scaling") && config["rope_scaling"].is_object()) {
    EXPECT_EQ(config["rope_scaling"], expected["rope_scaling"]);
  }
  for (const auto& [key, value] : config.items()) {
    if (!expected.contains(key)) {
      // Fields that the Hub config leaves at their defaults.
      EXPECT_TRUE(key == "hidden_act" || (key == "head_dim") || value == false || value.is_null()) << key;
    } else if (value.is_number_float()) {
      EXPECT_NEAR(value.get<double>(), expected[key].get<double>(), 1e-6 * expected[key].get<double>())
          << key;
    } else if (key == "bos_token_id" || key == "eos_token_id" || value.is_number() || value.is_boolean() ||
               value.is_string() || value.is_array()) {
      EXPECT_EQ(value, expected[key]) << key;
    }
  }
  EXPECT_EQ(gguf->container(), "gguf");
  ASSERT_NE(gguf->gguf(), nullptr);
  ASSERT_NE(gguf->gguf()->Strings("tokenizer.ggml.tokens"), nullptr);
  EXPECT_EQ(std::ssize(*gguf->gguf()->Strings("tokenizer.ggml.tokens")),
            expected["vocab_size"].get<int64_t>());
}

INSTANTIATE_TEST_SUITE_P(Refs, GgufRefsTest,
                         testing::Values("deepseek_v3-tiny", "qwen3_moe-tiny", "llama-tiny-tied"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moesaic::checkpoint
