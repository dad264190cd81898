// Reads the bytes of each scheme back with the checkpoint's reader, which is another decoder than the grid's.
#include "quantizer/format/scheme.h"

#include <gmock/gmock.h>

#include <array>

#include "checkpoint/checkpoint.h"
#include "checkpoint/test_files.h"

namespace moesaic::quantizer {
namespace {

// Reads a checkpoint with one linear "m" that is stored in these tensors.
StatusOr<std::vector<float>> ReadBack(Scheme scheme, const QuantizedMatrix& matrix) {
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const std::vector<StoredTensor> tensors = TensorsOf(matrix.grid, matrix.n, matrix.k);
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> out;
  for (const StoredTensor& tensor : tensors) {
    memory.emplace_back(static_cast<size_t>(tensor.bytes()));
    out.push_back(memory.back().data());
  }
  EncodeRows(*pool, matrix, tensors, out);
  checkpoint::SafetensorsMaker maker;
  for (size_t i = 0; i < tensors.size(); ++i) {
    maker.Add("m" + tensors[i].suffix, tensor::DTypeName(tensors[i].dtype).c_str(), tensors[i].shape,
              memory[i]);
  }
  nlohmann::json config;
  config["quantization_config"] = nlohmann::json(QuantizationConfig(scheme, matrix.grid.group, {"lm_head"}));
  const std::string file = maker.File();
  ASSIGN_OR_RETURN(const auto read,
                   checkpoint::Checkpoint::FromMemory(config.dump(), checkpoint::BytesOf(file)));
  ASSIGN_OR_RETURN(const checkpoint::LinearSource linear, read->FindLinear("m", matrix.n, matrix.k));
  std::vector<float> values(static_cast<size_t>(matrix.n) * matrix.k);
  RETURN_IF_ERROR(read->ReadLinearRows(linear, 0, matrix.n, values));
  return values;
}

void ExpectSameValues(Scheme scheme, const QuantizedMatrix& matrix) {
  const StatusOr<std::vector<float>> read = ReadBack(scheme, matrix);
  ASSERT_TRUE(read.ok()) << read.status();
  std::vector<float> meant(read->size());
  Dequantize(matrix, 0, matrix.n, meant.data());
  for (size_t i = 0; i < meant.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(meant[i]), std::bit_cast<uint32_t>((*read)[i]))
        << "value " << i << ": " << meant[i] << " and " << (*read)[i];
  }
}

// Covers all 16 codes under all finite non-negative scales, each code in both halves of a byte.
TEST(SchemeTest, EveryNvfp4CodeRoundTripsUnderEveryScale) {
  constexpr int kScales = 127;  // 0x7f is NaN
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kNvfp4, 0), .n = kScales, .k = 32, .codes = {}, .scales = {}};
  matrix.global_scale = 1234.5F;
  for (int scale = 0; scale < kScales; ++scale) {
    for (int i = 0; i < 32; ++i) matrix.codes.push_back(static_cast<uint8_t>((i + i / 16) % 16));
    matrix.scales.insert(matrix.scales.end(), 2, tensor::F8E4M3ToFloat(static_cast<uint8_t>(scale)));
  }
  ExpectSameValues(Scheme::kNvfp4, matrix);
}

TEST(SchemeTest, EveryInt4CodeRoundTripsUnderScalesOfBothSigns) {
  for (const int group : {32, 64, 128}) {
    QuantizedMatrix matrix{
        .grid = GridOf(Scheme::kW4A16, group), .n = 3, .k = 256, .codes = {}, .scales = {}};
    for (int i = 0; i < 3 * 256; ++i) matrix.codes.push_back(static_cast<uint8_t>((i + i / 16) % 16 - 8));
    for (int i = 0; i < 3 * 256 / group; ++i)
      matrix.scales.push_back((i % 2 == 0 ? 0.375F : -0.25F) / float(i + 1));
    for (float& scale : matrix.scales) scale = tensor::ToFloat(tensor::ToBF16(scale));
    ExpectSameValues(Scheme::kW4A16, matrix);
  }
}

TEST(SchemeTest, EveryInt8CodeRoundTrips) {
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kW8A8, 0), .n = 5, .k = 255, .codes = {}, .scales = {}};
  for (int i = 0; i < 5 * 255; ++i) matrix.codes.push_back(static_cast<uint8_t>(i % 255 - 127));
  matrix.scales = {0x1p-126F, 0.5F, 1, 3, 0x1p60F};
  ExpectSameValues(Scheme::kW8A8, matrix);
}

// Covers each code at each place of a word, under scales of both signs. For channels the last word is
// partial.
TEST(SchemeTest, EveryInt8CodeRoundTripsInGroups) {
  for (const int group : {32, 64, 128, 0}) {
    const int k = group > 0 ? 512 : 509, columns = group > 0 ? k / group : 1;
    QuantizedMatrix matrix{.grid = GridOf(Scheme::kW8A16, group), .n = 4, .k = k, .codes = {}, .scales = {}};
    for (int i = 0; i < 4 * k; ++i) matrix.codes.push_back(static_cast<uint8_t>(i + i / k));  // -128 too
    for (int i = 0; i < 4 * columns; ++i)
      matrix.scales.push_back((i % 2 == 0 ? 0.375F : -0.25F) / float(i + 1));
    for (float& scale : matrix.scales) scale = tensor::ToFloat(tensor::ToBF16(scale));
    ExpectSameValues(Scheme::kW8A16, matrix);
  }
}

// Checks the words and fields of compressed-tensors: value + 128 in bytes from the low end up
// (pack_to_int32).
TEST(SchemeTest, Int8WordsMatchCompressedTensors) {
  const auto pool = *runtime::ThreadPool::Create({.threads = 1, .pin = false});
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kW8A16, 0), .n = 1, .k = 5, .codes = {}, .scales = {2}};
  for (const int code : {-127, -1, 0, 1, 127}) matrix.codes.push_back(static_cast<uint8_t>(code));
  const std::vector<StoredTensor> tensors = TensorsOf(matrix.grid, 1, 5);
  std::array<uint32_t, 2> words = {};
  std::array<uint16_t, 1> scale = {};
  std::array<int64_t, 2> shape = {};
  std::byte* const out[] = {reinterpret_cast<std::byte*>(words.data()),
                            reinterpret_cast<std::byte*>(scale.data()),
                            reinterpret_cast<std::byte*>(shape.data())};
  EncodeRows(*pool, matrix, tensors, out);
  EXPECT_EQ(words, (std::array<uint32_t, 2>{0x8180'7f01U, 0xffU}));
  EXPECT_EQ(scale[0], 0x4000);
  EXPECT_EQ(shape, (std::array<int64_t, 2>{1, 5}));

  const auto weights = [](int group) {
    return QuantizationConfig(Scheme::kW8A16, group, {})["config_groups"]["group_0"]["weights"].dump();
  };
  EXPECT_EQ(
      weights(64),
      R"({"num_bits":8,"type":"int","symmetric":true,"strategy":"group","dynamic":false,"group_size":64})");
  EXPECT_EQ(
      weights(0),
      R"({"num_bits":8,"type":"int","symmetric":true,"strategy":"channel","dynamic":false,"group_size":-1})");
}

TEST(SchemeTest, ParsePrecisionInvertsName) {
  for (const char* name : {"w8a8", "w8a16-g32", "w8a16-g64", "w8a16-g128", "w8a16-channel", "w4a16-g32",
                           "w4a16-g64", "w4a16-g128", "nvfp4", "fp8", "bf16", "fp16", "fp32"}) {
    const StatusOr<Precision> precision = ParsePrecision(name);
    ASSERT_TRUE(precision.ok()) << precision.status();
    EXPECT_EQ(precision->Name(), name);
  }
  EXPECT_EQ(ParsePrecision("w8a16")->Name(), "w8a16-g32");
  EXPECT_EQ(ParsePrecision("w4a16")->Name(), "w4a16-g32");
  EXPECT_THAT(std::string(ParsePrecision("w4a16-channel").status().message()),
              testing::HasSubstr("w8a16-g128, w8a16-channel, w4a16-g32"));
  EXPECT_FALSE(ParsePrecision("w8a8-g32").ok());
}

TEST(SchemeTest, EveryFp8CodeRoundTripsInPartialBlocks) {
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kFp8, 0), .n = 131, .k = 254, .codes = {}, .scales = {}};
  for (int i = 0; i < 131 * 254; ++i) {
    const int code = i % 254;  // without the two NaNs
    matrix.codes.push_back(static_cast<uint8_t>(code < 127 ? code : code + 1));
  }
  matrix.scales = {0.5F, 2, 0x1p-20F, 1.5F};
  ExpectSameValues(Scheme::kFp8, matrix);
}

TEST(SchemeTest, UnknownNameIsRejected) {
  for (const std::string& name : SchemeNames()) EXPECT_EQ(SchemeName(*ParseScheme(name)), name);
  EXPECT_THAT(std::string(ParseScheme("int3").status().message()),
              testing::HasSubstr("must be one of w8a8, w8a16, w4a16, nvfp4, fp8, found \"int3\""));
}

}  // namespace
}  // namespace moesaic::quantizer
