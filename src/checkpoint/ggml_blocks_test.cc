#include "checkpoint/ggml_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "checkpoint/safetensors.h"
#include "runtime/memory.h"
#include "support/npz.h"
#include "tensor/print_formats.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;

std::string GoldensPath() {
  return std::string(MOESAIC_SOURCE_DIR) + "/../shared/data/refs/ggml_quant_goldens.npz";
}

class GgmlBlocksTest : public testing::TestWithParam<DType> {};

// Random blocks must equal the values of gguf-py, ggml's own Python package, bit for bit.
TEST_P(GgmlBlocksTest, DequantizesLikeGgml) {
  if (!std::filesystem::exists(GoldensPath())) GTEST_SKIP() << GoldensPath() << " is missing";
  const auto arrays = test_support::ReadNpz(GoldensPath());
  const std::string name = tensor::DTypeName(GetParam());
  const auto blocks = arrays.at(name + "_q").As<uint8_t>();
  const auto expected = arrays.at(name + "_f32").As<float>();
  ASSERT_EQ(static_cast<int64_t>(blocks.size()),
            tensor::BytesOf(GetParam(), static_cast<int64_t>(expected.size())));
  std::vector<float> values(expected.size());
  DequantizeBlocks(GetParam(), reinterpret_cast<const std::byte*>(blocks.data()),
                   static_cast<int64_t>(values.size()), values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(values[i])) << name << " element " << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(expected[i]))
          << name << " element " << i << ": " << values[i] << " and " << expected[i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GgmlBlocksTest,
                         testing::Values(DType::kBF16, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1,
                                         DType::kQ8_0, DType::kQ2K, DType::kQ3K, DType::kQ4K, DType::kQ5K,
                                         DType::kQ6K),
                         [](const auto& info) { return tensor::DTypeName(info.param); });

// Combines every scale with every code; the values are from gguf-py (tests/golden/ggml_mxfp4.py).
TEST(GgmlBlocks, DequantizesMxfp4LikeGgml) {
  const std::string path = MOESAIC_SOURCE_DIR "/tests/golden/ggml_mxfp4.safetensors";
  const auto mapped = runtime::MappedFile::Open(path);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  const auto file = ParseSafetensors((*mapped)->bytes(), path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto bytes_of = [&](const std::string& name) {
    return std::find_if(file->tensors.begin(), file->tensors.end(),
                        [&](const auto& t) { return t.name == name; })
        ->bytes;
  };
  std::vector<float> expected(bytes_of("values").size() / sizeof(float)), values(expected.size());
  ASSERT_EQ(expected.size(), 512U * 32);
  std::memcpy(expected.data(), bytes_of("values").data(), bytes_of("values").size());
  DequantizeBlocks(DType::kMxfp4, bytes_of("blocks").data(), static_cast<int64_t>(values.size()),
                   values.data());
  EXPECT_EQ(values, expected);  // includes infinities, but no NaN
}

// Compares the FP8 tables with those of ml_dtypes in the same archive.
TEST(Fp8, EveryCodeIsExact) {
  if (!std::filesystem::exists(GoldensPath())) GTEST_SKIP() << GoldensPath() << " is missing";
  const auto arrays = test_support::ReadNpz(GoldensPath());
  const auto e4m3 = arrays.at("F8_E4M3FN_f32").As<float>(), e5m2 = arrays.at("F8_E5M2_f32").As<float>();
  for (int code = 0; code < 256; ++code) {
    for (const auto& [value, expected] :
         {std::pair(tensor::F8E4M3ToFloat(static_cast<uint8_t>(code)), e4m3[code]),
          std::pair(tensor::F8E5M2ToFloat(static_cast<uint8_t>(code)), e5m2[code])}) {
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(value)) << code;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(expected)) << code;
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::checkpoint
