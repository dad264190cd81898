// The bytes of each scheme, read back by the checkpoint's own reader: another decoder than the grid's.
#include "quantizer/scheme.h"

#include <gmock/gmock.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/test_files.h"

namespace moesaic::quantizer {
namespace {

// A checkpoint with the one linear "m" that these tensors stand for.
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

// All 16 codes under all scales that are finite and not negative, each code in both halves of a byte.
TEST(SchemeTest, EveryNvfp4CodeAndScale) {
  constexpr int kScales = 127;  // 0x7f is NaN
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kNvfp4, 0), .n = kScales, .k = 32, .codes = {}, .scales = {}};
  matrix.global_scale = 1234.5F;
  for (int scale = 0; scale < kScales; ++scale) {
    for (int i = 0; i < 32; ++i) matrix.codes.push_back(static_cast<uint8_t>((i + i / 16) % 16));
    matrix.scales.insert(matrix.scales.end(), 2, tensor::F8E4M3ToFloat(static_cast<uint8_t>(scale)));
  }
  ExpectSameValues(Scheme::kNvfp4, matrix);
}

TEST(SchemeTest, EveryInt4CodeUnderScalesOfBothSigns) {
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

TEST(SchemeTest, EveryInt8Code) {
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kW8A8, 0), .n = 5, .k = 255, .codes = {}, .scales = {}};
  for (int i = 0; i < 5 * 255; ++i) matrix.codes.push_back(static_cast<uint8_t>(i % 255 - 127));
  matrix.scales = {0x1p-126F, 0.5F, 1, 3, 0x1p60F};
  ExpectSameValues(Scheme::kW8A8, matrix);
}

TEST(SchemeTest, EveryFp8CodeInBlocksCutShort) {
  QuantizedMatrix matrix{.grid = GridOf(Scheme::kFp8, 0), .n = 131, .k = 254, .codes = {}, .scales = {}};
  for (int i = 0; i < 131 * 254; ++i) {
    const int code = i % 254;  // without the two NaNs
    matrix.codes.push_back(static_cast<uint8_t>(code < 127 ? code : code + 1));
  }
  matrix.scales = {0.5F, 2, 0x1p-20F, 1.5F};
  ExpectSameValues(Scheme::kFp8, matrix);
}

TEST(SchemeTest, AnUnknownNameIsRefused) {
  for (const std::string& name : SchemeNames()) EXPECT_EQ(SchemeName(*ParseScheme(name)), name);
  EXPECT_THAT(std::string(ParseScheme("int3").status().message()),
              testing::HasSubstr("must be one of w8a8, w4a16, nvfp4, fp8, found \"int3\""));
}

}  // namespace
}  // namespace moesaic::quantizer
