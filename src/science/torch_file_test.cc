// PyTorch checkpoints: a golden file, and damaged copies of it.
#include "science/torch_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace moesaic::science {
namespace {

std::string GoldenBytes() {
  std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/src/science/goldens/checkpoint.pt", std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

StatusOr<TorchFile> Parse(const std::string& bytes) {
  return ParseTorchFile(std::as_bytes(std::span(bytes.data(), bytes.size())), "x.pt");
}

TEST(TorchFileTest, ReadsTensorsAndNumbers) {
  const TorchFile file = *Parse(GoldenBytes());
  EXPECT_EQ(file.numbers.at("num_edges"), 48);
  EXPECT_EQ(file.numbers.at("noise_level"), 0.2);
  const WeightMap tensors = file.Under("model_state_dict/");
  EXPECT_EQ(tensors.at("a.weight").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensors.at("a.weight").values, (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(tensors.at("a.transposed").shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(tensors.at("a.transposed").values, (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(tensors.at("half").values, (std::vector<float>{0.5F, -2}));
  EXPECT_EQ(tensors.at("bfloat").values, (std::vector<float>{0.5F, -2}));
  EXPECT_EQ(tensors.at("long").values, (std::vector<float>{7, -9}));
  EXPECT_EQ(tensors.at("scalar").shape, (std::vector<int64_t>{}));
  EXPECT_EQ(tensors.at("scalar").values, (std::vector<float>{3}));
  EXPECT_EQ(tensors.at("part").values, (std::vector<float>{2, 3}));
  EXPECT_TRUE(tensors.at("empty").values.empty());
}

TEST(TorchFileTest, DamagedFilesAreReported) {
  const std::string good = GoldenBytes();
  EXPECT_EQ(Message(Parse("").status()), "x.pt: no zip archive: only 0 bytes");
  for (size_t size = 0; size < good.size(); size += 7) EXPECT_FALSE(Parse(good.substr(0, size)).ok()) << size;
  // No damage of one byte may crash; most of the bytes are padding or data.
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    const auto file = Parse(bad);
    EXPECT_TRUE(file.ok() || !file.status().message().empty()) << at;
  }
}

}  // namespace
}  // namespace moesaic::science
